// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

const (
	pciAddress = "0000:1b:00.0"
	// nvidiaMajor and minor are the number of the GPU's device node.
	nvidiaMajor, minor = 195, 2
)

// TestHolderOfEndedContainer: a process that was passed an open device node is named when the container that passed it on has
// ended, and with it the /dev in which the node was.
func TestHolderOfEndedContainer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("device nodes and mounts need root")
	}
	proc := t.TempDir()
	information := filepath.Join(proc, "driver/nvidia/gpus", pciAddress, "information")
	err := errors.Join(os.MkdirAll(filepath.Dir(information), 0o755),
		os.WriteFile(information, []byte("Device Minor: \t "+strconv.Itoa(minor)+"\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	passed := nodeOfContainer(t)
	process := exec.Command("sleep", "infinity")
	process.ExtraFiles = []*os.File{passed}
	must.Do(t, process.Start())
	t.Cleanup(func() { _, _ = process.Process.Kill(), process.Wait() })
	_ = passed.Close()

	finder := &holder.Finder{Roots: host.Roots{Proc: proc}}
	got := finder.Describe(t.Context(), pciAddress, -1, nil)
	if want := "process " + strconv.Itoa(process.Process.Pid); !strings.Contains(got, want) {
		t.Errorf("the process that has the device node open is not named: held by %s", got)
	}
}

// nodeOfContainer opens the node of a GPU in the /dev of a container, which ends. There is no driver behind it, so that only its
// path can be opened.
func nodeOfContainer(t *testing.T) *os.File {
	t.Helper()
	dev := t.TempDir()
	err := unix.Mount("tmpfs", dev, "tmpfs", 0, "")
	if errors.Is(err, unix.EPERM) {
		t.Skipf("mount: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	node := filepath.Join(dev, "nvidia"+strconv.Itoa(minor))
	err = unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(nvidiaMajor, minor)))
	fd := -1
	if err == nil {
		fd, err = unix.Open(node, unix.O_PATH|unix.O_CLOEXEC, 0)
	}
	err = errors.Join(err, unix.Unmount(dev, unix.MNT_DETACH))
	if errors.Is(err, unix.EPERM) {
		t.Skipf("make a device node: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), node)
}
