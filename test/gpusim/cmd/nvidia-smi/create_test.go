// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// layout is the instances of a GPU as "id profile@start+size", with the
// profiles of their compute instances.
func (n node) layout(index int) []string {
	n.t.Helper()
	var out []string
	for _, in := range n.machine().GPUs[index].MIG.Instances {
		line := fmt.Sprintf("%d %d@%d+%d", in.ID, in.ProfileID, in.Placement.Start, in.Placement.Size)
		for _, ci := range in.Compute {
			line += fmt.Sprintf(" ci%d:%d", ci.ID, ci.ProfileID)
		}
		out = append(out, line)
	}
	return out
}

func (n node) wantLayout(index int, want ...string) {
	n.t.Helper()
	expect.Same(n.t, n.layout(index), want, "instances of GPU", index)
}

// An administrator's session, step by step. The goldens show the answers.
func TestCreateAndDestroy(t *testing.T) {
	n := newNode(t, "h100x2", func(m *machine.Machine) {
		for i := range m.GPUs {
			m.GPUs[i].MIG.Current, m.GPUs[i].MIG.Pending = true, true
		}
	})
	n.golden("cgi-compute.txt", 0, "mig", "-cgi", "19:4", "-C", "-i", "0")
	n.wantLayout(0, "11 19@4+1 ci0:0")
	n.wantLayout(1)
	n.golden("cgi.txt", 0, "mig", "-i", "1", "-cgi", "3g.40gb,MIG 1g.10gb+me:6")
	n.wantLayout(1, "1 9@0+4", "13 20@6+1")
	n.golden("cgi-no-room.txt", exitOther, "mig", "-cgi", "19:4", "-i", "0")
	n.golden("cgi-placement.txt", exitUsage, "mig", "-cgi", "9:3", "-i", "0")
	n.golden("cgi-profile.txt", exitUsage, "mig", "-cgi", "8g.99gb", "-i", "0")
	n.wantLayout(0, "11 19@4+1 ci0:0")
	n.golden("dgi-in-use.txt", exitOther, "mig", "-dgi", "-i", "0")
	n.golden("dci-none.txt", exitNotFound, "mig", "-dci", "-i", "0", "-gi", "11", "-ci", "3")
	n.wantLayout(0, "11 19@4+1 ci0:0")
	n.golden("dci.txt", 0, "mig", "-dci", "-i", "0")
	n.wantLayout(0, "11 19@4+1")
	n.golden("dgi.txt", 0, "mig", "-dgi", "-gi", "1")
	n.wantLayout(1, "13 20@6+1")
	n.golden("dgi-all.txt", 0, "mig", "-dgi")
	n.wantLayout(0)
	n.wantLayout(1)
	n.golden("dgi-none.txt", exitNotFound, "mig", "-dgi")
}

// With MIG mode off there is nothing to create on.
func TestCreateNeedsMIGMode(t *testing.T) {
	n := newNode(t, "h100x1", nil)
	out, exit := n.smi("mig", "-cgi", "19", "-C")
	if exit != exitNotFound || !strings.Contains(out, "No MIG-enabled devices found.") {
		t.Errorf("exit code %d, %s", exit, out)
	}
}

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
	m := must.Get(sysroot.Load(n.root))(t)
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
