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

// Reboot does to a machine what a reboot does: processes and MIG instances are
// gone, settings are back at their defaults, the boot id is another one. The MIG
// mode is kept on boards that need a reset to change it, where a pending change
// takes effect, and is off on the others.
func Reboot(root string) error {
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
	err = f.Update(func(m *machine.Machine) error {
		reboot(m)
		// Inside the update: a failure leaves the machine as it was. The
		// capability files follow the instances by themselves.
		t := &tree{root: root, written: map[string]bool{}}
		t.file(bootIDFile, lines(m.BootID))
		return t.err
	})
	if err != nil {
		return fmt.Errorf("reboot %s: %w", root, err)
	}
	return nil
}

func reboot(m *machine.Machine) {
	m.BootID = catalog.NewBootID(m.BootID)
	m.Processes = nil
	for i := range m.GPUs {
		g := &m.GPUs[i]
		g.ComputeMode, g.TimeSlice, g.Persistence = 0, 0, false
		if g.MIG == nil {
			continue
		}
		g.MIG.Instances = nil
		g.MIG.Current = g.MIG.ResetToSwitch && g.MIG.Pending
		g.MIG.Pending = g.MIG.Current
	}
}
