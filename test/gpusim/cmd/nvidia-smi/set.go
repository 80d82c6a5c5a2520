// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// terminating is what the real tool says after a change that failed.
const terminating = "\nTerminating early due to previous errors."

var computeModes = map[string]nvml.ComputeMode{
	"0": nvml.COMPUTEMODE_DEFAULT, "DEFAULT": nvml.COMPUTEMODE_DEFAULT,
	"1": nvml.COMPUTEMODE_EXCLUSIVE_THREAD, "EXCLUSIVE_THREAD": nvml.COMPUTEMODE_EXCLUSIVE_THREAD,
	"2": nvml.COMPUTEMODE_PROHIBITED, "PROHIBITED": nvml.COMPUTEMODE_PROHIBITED,
	"3": nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, "EXCLUSIVE_PROCESS": nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
}

// setComputeMode is -c.
func setComputeMode(s *session, gpus []gpu, c *command, out io.Writer) error {
	mode, ok := computeModes[strings.ToUpper(c.value)]
	if !ok {
		return fail(exitUsage, "Unable to parse \"%s\" as a compute mode.", c.value)
	}
	for _, g := range gpus {
		if ret := g.SetComputeMode(mode); ret != nvml.SUCCESS {
			return fail(code(ret), "Unable to set the compute mode for GPU %s: %s"+terminating, g.busID, s.text(ret))
		}
		fmt.Fprintf(out, "Set compute mode to %s for GPU %s.\n", strings.ToUpper(computeModeNames[mode]), g.busID)
	}
	fmt.Fprintln(out, "All done.")
	return nil
}

// setMIGMode is -mig.
func setMIGMode(s *session, gpus []gpu, c *command, out io.Writer) error {
	mode := map[string]int{"0": nvml.DEVICE_MIG_DISABLE, "1": nvml.DEVICE_MIG_ENABLE}
	wanted, ok := mode[c.value]
	if !ok {
		return fail(exitUsage, "Unable to parse \"%s\" as a MIG mode.", c.value)
	}
	for _, g := range gpus {
		verb := strings.TrimSuffix(onOff(wanted), "d")
		activation, ret := g.SetMigMode(wanted)
		if ret != nvml.SUCCESS {
			return fail(code(ret), "Unable to %s MIG Mode for GPU %s: %s"+terminating, strings.ToLower(verb), g.busID, s.text(ret))
		}
		if activation != nvml.SUCCESS {
			fmt.Fprintf(out, "Warning: MIG mode is in pending %s state for GPU %s:%s\n", strings.ToLower(verb), g.busID, s.text(activation))
			continue
		}
		fmt.Fprintf(out, "%sd MIG Mode for GPU %s\n", verb, g.busID)
	}
	fmt.Fprintln(out, "All done.")
	return nil
}

// timeSlices are the names of the policy's values. How the real tool words its
// answers here is assumed.
var timeSlices = []string{"Default", "Short", "Medium", "Long"}

// setTimeSlice is compute-policy --set-timeslice.
func setTimeSlice(_ *session, gpus []gpu, c *command, out io.Writer) error {
	interval := strings.Index("0123", c.value)
	if len(c.value) != 1 || interval < 0 {
		return fail(exitUsage, "Unable to parse \"%s\" as a timeslice: it is 0 (default), 1 (short), 2 (medium) or 3 (long).", c.value)
	}
	if os.Geteuid() != 0 {
		return fail(exitPermission, "Failed to set timeslice policy: Insufficient Permissions")
	}
	err := withState(func(f *state.File) error {
		return f.Update(func(m *machine.Machine) error {
			for _, g := range gpus {
				of := byUUID(m, g.uuid)
				if of == nil {
					return fmt.Errorf("GPU %s is gone", g.busID)
				}
				of.TimeSlice = interval
			}
			return nil
		})
	})
	if err != nil {
		return fail(exitOther, "Failed to set timeslice policy: %v", err)
	}
	for _, g := range gpus {
		fmt.Fprintf(out, "Successfully set timeslice to %s for GPU %s.\n", timeSlices[interval], g.busID)
	}
	return nil
}

// listPolicies is compute-policy -l.
func listPolicies(_ *session, gpus []gpu, _ *command, out io.Writer) error {
	var m *machine.Machine
	err := withState(func(f *state.File) (err error) {
		m, err = f.Snapshot()
		return err
	})
	if err != nil {
		return fail(exitOther, "Failed to display compute policies: %v", err)
	}
	const rule = "+---------------------------------+\n"
	fmt.Fprint(out, rule, "| GPU compute policies:           |\n| GPU     Name           Policy   |\n|=================================|\n")
	for _, g := range gpus {
		if of := byUUID(m, g.uuid); of != nil && of.TimeSlice >= 0 && of.TimeSlice < len(timeSlices) {
			fmt.Fprintf(out, "|%4d     Timeslice      %-8s |\n%s", g.index, timeSlices[of.TimeSlice], rule)
		}
	}
	return nil
}

func byUUID(m *machine.Machine, uuid string) *machine.GPU {
	for i := range m.GPUs {
		if m.GPUs[i].UUID == uuid {
			return &m.GPUs[i]
		}
	}
	return nil
}
