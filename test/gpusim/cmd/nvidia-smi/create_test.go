// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
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
	if d := cmp.Diff(want, n.layout(index)); d != "" {
		n.t.Errorf("instances of GPU %d: %s", index, d)
	}
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
