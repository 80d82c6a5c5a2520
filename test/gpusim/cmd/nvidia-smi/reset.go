// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// resetGPUs is --gpu-reset. NVML has no public call for it. The words of the real tool are
// those of transcripts; the exit code for a GPU in use is assumed.
func resetGPUs(_ *session, gpus []gpu, _ *command, out io.Writer) error {
	if os.Geteuid() != 0 {
		return fail(exitPermission, "Unable to reset GPUs: Insufficient Permissions"+terminating)
	}
	for _, g := range gpus {
		err := withState(func(f *state.File) error {
			return f.Update(func(m *machine.Machine) error {
				i := slices.IndexFunc(m.GPUs, func(of machine.GPU) bool {
					return strings.HasSuffix(strings.ToLower(g.busID), of.PCIAddress)
				})
				if i < 0 {
					return fmt.Errorf("GPU %s is gone", g.busID)
				}
				return m.ResetGPU(i)
			})
		})
		if err != nil {
			return fail(exitOther, "GPU Reset couldn't run because GPU %s is in use by another client: %v", g.busID, err)
		}
		fmt.Fprintf(out, "GPU %s was successfully reset.\n", g.busID)
	}
	fmt.Fprintln(out, "All done.")
	return nil
}
