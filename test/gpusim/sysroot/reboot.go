// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"fmt"
	"path/filepath"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// RebootOptions say what more a reboot does.
type RebootOptions struct {
	// Renumber gives every GPU the minor of another one, and the majors that
	// are not registered other numbers, as happens when drivers are loaded in
	// another order. UUIDs and PCI addresses stay. A machine with one GPU keeps
	// its minor.
	Renumber bool
}

// Reboot does to a machine what a reboot does: processes and MIG instances are
// gone, settings are back at their defaults, the boot id is another one. The MIG
// mode is kept on boards that need a reset to change it, where a pending change
// takes effect, and is off on the others. A GPU that was lost or needed a reset
// is well again. Faults and latencies stay.
//
// The boot id in the files changes last: a process that reads the new one finds that
// all else is new too. A reboot that failed in between is completed by the next.
func Reboot(root string, o RebootOptions) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return fmt.Errorf("root: %w", err)
	}
	if err := own(root); err != nil {
		return err
	}
	f, err := state.Open(StatePath(root))
	if err != nil {
		return fmt.Errorf("machine state: %w", err)
	}
	defer f.Close()
	// The capability files follow the instances and minors by themselves.
	err = f.Update(func(m *machine.Machine) error {
		reboot(m, o)
		return nil
	})
	if err != nil {
		return fmt.Errorf("reboot %s: %w", root, err)
	}
	// The lock keeps the files of two reboots at the same time apart.
	err = f.Update(func(m *machine.Machine) error { return bootFiles(root, m, o) })
	if err != nil {
		return fmt.Errorf("files of %s after its reboot: %w", root, err)
	}
	return nil
}

// bootFiles writes what differs after a reboot and does not follow by itself.
func bootFiles(root string, m *machine.Machine, o RebootOptions) error {
	t := newTree(root)
	if o.Renumber {
		n, err := majorsOf(root)
		if err != nil {
			return err
		}
		n = n.next()
		informations(t, m)
		devices(t, m, n, driverFolder(root))
		if t.err != nil {
			return t.err
		}
		// Nodes of capabilities that were made have the old major. Those that the library
		// made on the host of a driver container go as well: /dev is empty after a boot.
		if err := t.sweep("dev", driverFolder(root)+"dev"); err != nil {
			return err
		}
		t.file(devicesFile, procDevices(n))
	}
	t.file(bootIDFile, lines(m.BootID))
	return t.err
}

func reboot(m *machine.Machine, o RebootOptions) {
	m.BootID = catalog.NewBootID(m.BootID)
	m.Processes, m.Events = nil, nil
	if o.Renumber {
		renumber(m)
	}
	for i := range m.GPUs {
		m.GPUs[i].Reset()
		m.GPUs[i].Persistence = false
		m.GPUs[i].TimeSlice = 0
	}
}

// renumber passes the minors on to the next GPU, which leaves the same device
// nodes, each of another GPU.
func renumber(m *machine.Machine) {
	if len(m.GPUs) == 0 {
		return
	}
	first := m.GPUs[0].Minor
	for i := range len(m.GPUs) - 1 {
		m.GPUs[i].Minor = m.GPUs[i+1].Minor
	}
	m.GPUs[len(m.GPUs)-1].Minor = first
}
