// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// struck does what the program is to do, or what a fault of the machine wants in its place. Its calls of the library
// are struck by themselves.
func struck(c *command, do func() error) error {
	at, err := state.Find()
	if err != nil {
		return do() // which says what is missing
	}
	f, err := state.Open(at.State)
	if err != nil {
		return do()
	}
	defer f.Close()
	m, err := f.Snapshot()
	if err != nil {
		return err
	}
	err = f.Around(state.SMI, selectedIndexes(m, c), do)
	if errors.Is(err, state.ErrStruck) {
		return fail(exitOther, "nvidia-smi %v", err)
	}
	return err
}

// selectedIndexes are the indexes of the GPUs that -i selects.
func selectedIndexes(m *machine.Machine, c *command) []int {
	var gpus []int
	for i := range m.GPUs {
		g := gpu{index: i, uuid: m.GPUs[i].UUID, busID: "0000" + strings.ToUpper(m.GPUs[i].PCIAddress)}
		if len(c.ids) == 0 || slices.ContainsFunc(c.ids, g.is) {
			gpus = append(gpus, i)
		}
	}
	return gpus
}
