// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
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

// spoilSMI makes setting time slices go wrong until the result is called.
func (n *node) spoilSMI(t testing.TB, script string) (repair func()) {
	t.Helper()
	path := filepath.Join(n.root, "usr/bin/nvidia-smi")
	rename(t, path, path+".real")
	text := fmt.Sprintf("#!/bin/sh\nreal=%s.real\ncase \"$*\" in\n*--set-timeslice*) %s ;;\nesac\nexec $real \"$@\"\n", path, script)
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		rename(t, path+".real", path)
	}
}

// TestFaultsOfIntervals: when a time slice cannot be set, the claim is not prepared
// and says why. When it cannot be set back, that is not forgotten.
func TestFaultsOfIntervals(t *testing.T) {
	t.Parallel()
	for name, script := range badSMI {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "l4x2")
			p := n.start(t, frequent...)
			p.ready(t)
			before := n.traces(t)
			c := n.claim(t, []request{{gpu: 0}}, gpuShort)
			beside := n.claim(t, []request{{gpu: 1}})
			repair := n.spoilSMI(t, script)
			_, err := p.tryPrepare(t.Context(), c, 2*hurry)
			if err == nil {
				t.Fatal("prepared without the interval")
			}
			if !tookTooLong(err) {
				for _, want := range []string{n.address(t, 0), "nvidia-smi"} {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("the error does not name %s: %v", want, err)
					}
				}
			}
			p.mustPrepare(t, beside)
			p.mustUnprepare(t, beside)
			repair()
			p.mustPrepare(t, c)
			n.wantSlice(t, "prepared", 0, shortSlice)

			repair = n.spoilSMI(t, script)
			_ = p.tryUnprepare(t.Context(), c, 2*hurry)
			repair()
			if err := p.tryUnprepare(t.Context(), c, kubeletTime); err != nil {
				t.Errorf("unprepare: %v", err)
			}
			p.untilLeft(t, n, before)
		})
	}
}

// TestNoSMI: without nvidia-smi only intervals are refused.
func TestNoSMI(t *testing.T) {
	t.Parallel()
	n := newNode(t, "l4x1", func(m *machine.Machine) { m.GPUs[0].TimeSlice = mediumSlice })
	p := n.start(t)
	p.ready(t)
	if err := os.Remove(filepath.Join(n.root, "usr/bin/nvidia-smi")); err != nil {
		t.Fatal(err)
	}
	c := n.claim(t, []request{{}}, gpuShort)
	if got := p.prepare(t, c)[0].GetError(); !strings.Contains(got, "nvidia-smi") {
		t.Errorf("prepare without nvidia-smi: %q", got)
	}
	p.mustUnprepare(t, c)
	for _, device := range []request{{}, {kind: asTimeSlice}} {
		c := n.claim(t, []request{device})
		p.mustPrepare(t, c)
		p.mustUnprepare(t, c)
	}
	n.wantSlice(t, "in the end", 0, mediumSlice)
}
