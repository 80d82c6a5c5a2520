// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// nvidiaMajor is registered for NVIDIA and never changes.
const nvidiaMajor = 195

// majors are the major numbers that the kernel assigns when the driver is
// loaded, so any free ones are as good. A root keeps them in its proc/devices.
type majors struct{ caps, uvm int }

// The kernel hands out majors from 511 down to 384 once the low ones are used
// up. firstMajors are those of a machine that was never renumbered.
var firstMajors = majors{caps: 508, uvm: 510}

const (
	lowestMajor  = 384
	highestMajor = 511
)

// next are others than these. What uvm gets is what caps had, so that a node
// of before the reboot leads to a wrong driver and not to none.
func (n majors) next() majors {
	lower := func(major int) int {
		if major -= firstMajors.uvm - firstMajors.caps; major >= lowestMajor {
			return major
		}
		return major + highestMajor + 1 - lowestMajor
	}
	return majors{caps: lower(n.caps), uvm: lower(n.uvm)}
}

var majorLine = regexp.MustCompile(`(?m)^ *([0-9]+) nvidia-(caps|uvm)$`)

// majorsOf reads the majors of an existing root.
func majorsOf(root string) (majors, error) {
	text, err := os.ReadFile(filepath.Join(root, devicesFile))
	if err != nil {
		return majors{}, fmt.Errorf("major numbers: %w", err)
	}
	found := map[string]int{}
	for _, m := range majorLine.FindAllSubmatch(text, -1) {
		if found[string(m[2])], err = strconv.Atoi(string(m[1])); err != nil {
			return majors{}, fmt.Errorf("major numbers in %s: %w", devicesFile, err)
		}
	}
	n := majors{caps: found["caps"], uvm: found["uvm"]}
	if n.caps == 0 || n.uvm == 0 {
		return majors{}, fmt.Errorf("%s of %s lists no nvidia-caps or no nvidia-uvm", devicesFile, root)
	}
	return n, nil
}

// devices makes the character nodes, those of the driver in the folder that it is in.
// Nodes of capabilities are on the host, and appear when a process asks for them, as on a
// real machine; only the two that are always there exist from the start.
func devices(t *tree, m *machine.Machine, n majors, driver string) {
	dev := driver + "dev/"
	for _, g := range m.GPUs {
		t.node(fmt.Sprintf("%snvidia%d", dev, g.Minor), 0o666, nvidiaMajor, g.Minor)
	}
	t.node(dev+"nvidiactl", 0o666, nvidiaMajor, 255)
	t.node(dev+"nvidia-modeset", 0o666, nvidiaMajor, 254)
	t.node(dev+"nvidia-uvm", 0o666, n.uvm, 0)
	t.node(dev+"nvidia-uvm-tools", 0o666, n.uvm, 1)
	t.node("dev/nvidia-caps/nvidia-cap1", 0o400, n.caps, capConfig)
	t.node("dev/nvidia-caps/nvidia-cap2", 0o444, n.caps, capMonitor)
}

// notPermitted explains the failure that everybody without privileges meets.
func notPermitted(path string, err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("device node %s: %w (a simulated machine has real character nodes: run as root, with CAP_MKNOD and not in a user namespace)", path, err)
	}
	return fmt.Errorf("device node %s: %w", path, err)
}
