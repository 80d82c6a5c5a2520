// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// A GPU is reset if nobody uses it, also one that needs it and answers nothing else, but not
// one that is lost.
func TestReset(t *testing.T) {
	n := newNode(t, "mixed", func(m *machine.Machine) {
		divided(m)
		m.GPUs[0].Failure, m.GPUs[0].ComputeMode, m.GPUs[0].TimeSlice = 16, 3, 2
	})
	if err := os.Chmod(filepath.Dir(n.root), 0o755); err != nil { // for the other user
		t.Fatal(err)
	}
	for _, test := range []struct {
		args string
		exit int
		says string
		who  uint32
	}{
		{"-r -i 0", exitPermission, "Insufficient Permissions", 1000},
		{"-r -i 0", exitOK, "was successfully reset.\nAll done.", 0},
		{"--gpu-reset -i 1", exitOther, "is in use by another client: GPU 1 is in use by process 4711 (python3)", 0},
	} {
		n.uid = test.who
		out, exit := n.smi(strings.Fields(test.args)...)
		if exit != test.exit || !strings.Contains(out, test.says) {
			t.Errorf("%s: exit code %d, want %d with %q, output\n%s", test.args, exit, test.exit, test.says, out)
		}
	}
	m, err := sysroot.Load(n.root)
	if err != nil {
		t.Fatal(err)
	}
	if m.GPUs[0].Failure != 0 || m.GPUs[0].Resets != 1 || m.GPUs[1].Resets != 0 {
		t.Errorf("failure %d, resets %d and %d", m.GPUs[0].Failure, m.GPUs[0].Resets, m.GPUs[1].Resets)
	}
	// The kernel module has the time slice.
	if m.GPUs[0].ComputeMode != 0 || m.GPUs[0].TimeSlice != 2 {
		t.Errorf("compute mode %d, time slice %d", m.GPUs[0].ComputeMode, m.GPUs[0].TimeSlice)
	}
	lost := newNode(t, "l4x1", func(m *machine.Machine) { m.GPUs[0].Failure = 15 })
	if out, exit := lost.smi("-r"); exit != exitLost || !strings.Contains(out, "GPU is lost") {
		t.Errorf("lost GPU: exit code %d, output\n%s", exit, out)
	}
}
