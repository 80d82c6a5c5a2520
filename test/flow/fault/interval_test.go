// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// badSMI are ways in which nvidia-smi sets no time slice, or does and fails. $real
// is the program that works.
var badSMI = map[string]string{
	"fails":                       `echo "Failed to set timeslice policy: Unknown Error"; exit 255`,
	"fails after it did its work": `$real "$@"; echo "Failed to set timeslice policy: Unknown Error"; exit 255`,
	"does nothing":                `echo "Successfully set timeslice"; exit 0`,
	"may not":                     `echo "Failed to set timeslice policy: Insufficient Permissions"; exit 4`,
	"does not end":                `exec sleep 3600`,
}

// breakSMI makes setting time slices go wrong until the result is called.
func breakSMI(t testing.TB, n *harness.Node, script string) (repair func()) {
	t.Helper()
	path := filepath.Join(n.Root, "usr/bin/nvidia-smi")
	if _, err := os.Stat(path + ".real"); err != nil {
		// It stays: who replaces a script while it is started has the shell read something else.
		harness.Rename(t, path, path+".real")
		text := fmt.Sprintf("#!/bin/sh\nreal=%[1]s.real\ncase \"$*\" in\n*--set-timeslice*) [ -e %[1]s.broken ] && . %[1]s.broken ;;\nesac\nexec $real \"$@\"\n", path)
		must.Do(t, os.WriteFile(path, []byte(text), 0o755))
	}
	must.Do(t, os.WriteFile(path+".new", []byte(script+"\n"), 0o600))
	harness.Rename(t, path+".new", path+".broken")
	return func() {
		t.Helper()
		must.Do(t, os.Remove(path+".broken"))
	}
}

// TestFaultsOfIntervals checks that a claim whose time slice cannot be set is refused with
// the reason, and that resetting a time slice is repeated until it succeeds.
func TestFaultsOfIntervals(t *testing.T) {
	t.Parallel()
	for name, script := range badSMI {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewDriver(t, "l4x2", harness.Frequent...)
			before := n.Snapshot(t)
			c := n.Allocate(t, []harness.Device{{GPU: 0}}, harness.GPUWithShortSlice)
			beside := n.Allocate(t, []harness.Device{{GPU: 1}})
			repair := breakSMI(t, n, script)
			_, err := p.TryPrepare(t.Context(), c, 2*harness.ShortTimeout)
			if err == nil {
				t.Fatal("prepared without the interval")
			}
			if !harness.IsTimeout(err) {
				for _, want := range []string{n.Address(t, 0), "nvidia-smi"} {
					expect.Contains(t, err.Error(), want, "the error does not name", err)
				}
			}
			p.MustPrepare(t, beside)
			p.MustUnprepare(t, beside)
			repair()
			p.MustPrepare(t, c)
			n.WantSlice(t, "prepared", 0, harness.ShortSlice)

			repair = breakSMI(t, n, script)
			_ = p.TryUnprepare(t.Context(), c, 2*harness.ShortTimeout)
			repair()
			expect.Do(t, p.TryUnprepare(t.Context(), c, harness.KubeletTimeout), "unprepare")
			p.UntilSnapshot(t, n, before)
		})
	}
}

// TestNoSMI checks that only intervals are refused without nvidia-smi.
func TestNoSMI(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x1", func(m *machine.Machine) { m.GPUs[0].TimeSlice = harness.MediumSlice })
	p := n.Run(t)
	must.Do(t, os.Remove(filepath.Join(n.Root, "usr/bin/nvidia-smi")))
	c := n.Allocate(t, []harness.Device{{}}, harness.GPUWithShortSlice)
	expect.Contains(t, p.Prepare(t, c)[0].GetError(), "nvidia-smi", "prepare without nvidia-smi")
	p.MustUnprepare(t, c)
	for _, device := range []harness.Device{{}, {Kind: harness.TimeSlice}} {
		p.WantFree(t, n, device)
	}
	n.WantSlice(t, "in the end", 0, harness.MediumSlice)
}
