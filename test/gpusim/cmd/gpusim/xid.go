// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// XIDs that follow from something else.
const (
	fallenOffTheBus       = 79
	recoveryActionChanged = 154
)

func xidCommand() *cli.Command {
	return &cli.Command{
		Name:      "xid",
		Usage:     "let the driver report an XID",
		ArgsUsage: "[ROOT]",
		Description: "Who waits for events of NVML gets it. It is on the whole GPU, on a GPU instance, or on\n" +
			"one compute instance of that. Nothing else happens: what an XID comes with is to be\n" +
			"said beside it, as by --recovery-action or \"gpusim gpu\".\n\n" +
			"   gpusim xid --gpu 1 --xid 94 --gi 9 --ci 0\n" +
			"   gpusim xid --gpu 1 --xid 95 --recovery-action reset",
		Flags: []cli.Flag{
			rootFlag(), gpuFlag(),
			&cli.StringFlag{Name: "xid", Usage: "`NUMBER` of the XID", Required: true},
			&cli.IntFlag{Name: "gi", Usage: "`ID` of the GPU instance", Value: -1},
			&cli.IntFlag{Name: "ci", Usage: "`ID` of the compute instance", Value: -1},
			&cli.StringFlag{Name: "recovery-action", Usage: "`ACTION` that the driver wants from now on: " + strings.Join(recoveryActions, ", ")},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			xid, err := numberOf(c, "xid")
			if err != nil {
				return err
			}
			e := machine.Event{Type: nvml.EventTypeXidCriticalError, XID: uint64(xid), InstanceID: c.Int("gi"), ComputeID: c.Int("ci")}
			return onGPU(c, func(m *machine.Machine, i int) error {
				if err := affects(&m.GPUs[i], i, &e); err != nil {
					return err
				}
				e.GPU = i
				state.AddEvent(m, e)
				return changeState(c, m, i)
			})
		},
	}
}

// affects checks that the instance that an event is on exists.
func affects(g *machine.GPU, i int, e *machine.Event) error {
	if e.InstanceID < 0 && e.ComputeID < 0 {
		return nil
	}
	// What a process could hold, an XID can be on. It may also be on all of a GPU instance.
	p := machine.Process{GPU: i, InstanceID: e.InstanceID, ComputeID: e.ComputeID}
	if e.ComputeID >= 0 {
		return place(g, &p)
	}
	if g.MIG == nil || !slices.ContainsFunc(g.MIG.Instances, func(in machine.GPUInstance) bool { return in.ID == e.InstanceID }) {
		return errors.New("there is no such GPU instance, see gpusim show")
	}
	return nil
}

// addEvent adds an event that is on the whole GPU.
func addEvent(m *machine.Machine, i int, kind uint64) {
	state.AddEvent(m, machine.Event{GPU: i, Type: kind, InstanceID: -1, ComputeID: -1})
}

func addXID(m *machine.Machine, i int, xid uint64) {
	state.AddEvent(m, machine.Event{GPU: i, Type: nvml.EventTypeXidCriticalError, XID: xid, InstanceID: -1, ComputeID: -1})
}

// setRecoveryAction sets it and reports a change as the driver does: by XID 154, and by an
// event of its own.
func setRecoveryAction(m *machine.Machine, i, action int) {
	h := &m.GPUs[i].Health
	if action < 0 || h.RecoveryAction == action {
		return
	}
	h.RecoveryAction = action
	addXID(m, i, recoveryActionChanged)
	addEvent(m, i, nvml.EventTypeGpuRecoveryAction)
}

func resetCommand() *cli.Command {
	return &cli.Command{
		Name:      "reset",
		Usage:     "reset a GPU",
		ArgsUsage: "[ROOT]",
		Description: "Does to one GPU what a reset does, as of its slot by the machine: also one that is lost\n" +
			"is back. Its MIG instances are gone, the errors since the last reset are forgotten,\n" +
			"remapping and repairs that were pending are done, and no recovery action is wanted.\n" +
			"NVML handles from before are refused. Fails while a process has the GPU.\n" +
			"\"nvidia-smi --gpu-reset -i GPU\" does the same for a GPU that is not lost.",
		Flags: []cli.Flag{rootFlag(), gpuFlag()},
		Action: func(_ context.Context, c *cli.Command) error {
			return onGPU(c, func(m *machine.Machine, i int) error { return m.ResetGPU(i) })
		},
	}
}
