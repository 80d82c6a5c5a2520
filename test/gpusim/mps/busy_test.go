// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// busy is the utilisation of a program by its PID, as others see it; -1: it is not there.
func (n *node) busy(h *holder) int {
	n.t.Helper()
	for _, p := range n.machine().Processes {
		if p.PID == h.Process.Pid && p.Kind != machine.MPSServer {
			return p.SM
		}
	}
	return -1
}

// Programs that have a kernel on the device are busy, also those that may not write the
// state, and clients of MPS with as much as they may use.
func TestBusyPrograms(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.env = []string{n.visible(0)}
	for _, test := range []struct {
		who  as
		args []string
		want int
	}{
		{as{}, nil, 0}, {as{}, []string{"--busy"}, 100}, {as{}, []string{"--busy", "--sm", "40"}, 40},
		{as{uid: 1000}, nil, 0}, {as{uid: 1000}, []string{"--busy", "--sm", "40"}, 40},
	} {
		h := n.hold(test.who, test.args...).says("ready")
		if sm := n.busy(h); sm != test.want {
			t.Errorf("user %d, %v: %d %% busy, want %d %%", test.who.uid, test.args, sm, test.want)
		}
		h.stop()
	}
	n.daemon()
	h := n.hold(as{env: []string{PercentageVariable + "=25"}}, "--busy").says("ready")
	idle := n.hold(as{}).says("ready")
	if sm, none := n.busy(h), n.busy(idle); sm != 25 || none != 0 {
		t.Errorf("clients of MPS: %d %% and %d %% busy", sm, none)
	}
	h.stop()
	idle.stop()
}
