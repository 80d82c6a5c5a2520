// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// TestClientPriority: the priority of a session is that of the daemon, as long as it lasts.
func TestClientPriority(t *testing.T) {
	w, s := supervised(t)
	spec := mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25, ClientPriority: mps.PriorityBelowNormal}
	first := must.Get(s.Ensure(t.Context(), spec))(t)
	c := clientOf(t, s, "gpu-0")
	in := func(spec mps.Spec) bool { return hasLimits(t, c, first.Servers[0], spec) == nil }
	with := func(p mps.ClientPriority) mps.Spec {
		other := spec
		other.ClientPriority = p
		return other
	}
	if !in(spec) {
		t.Error("the daemon has another priority")
	}
	// Root on the node can change it.
	must.Do(t, c.SetLimits(t.Context(), with(mps.PriorityNormal), first.Servers[0]))
	eventually(t, "the priority to be as before", func() bool { return in(spec) })

	for _, p := range []mps.ClientPriority{mps.PriorityNormal, mps.PriorityBelowNormal, ""} {
		status, err := s.Ensure(t.Context(), with(p))
		must.Do(t, err, p)
		want := p
		if p == "" {
			want = mps.PriorityNormal // it was another before
		}
		if !in(with(want)) || status.Spec.ClientPriority != want || !cmp.Equal(status.Servers, first.Servers) || status.Losses > 0 {
			t.Errorf("%q: got %+v", p, status)
		}
	}

	// A change of limits that fails takes the priority back.
	w.script(script{IgnoreServer: true})
	other := with(mps.PriorityBelowNormal)
	other.ThreadPercentage = 50
	expect.Says(t, expect.Err(s.Ensure(t.Context(), other)), "percentage is 25, want 50")
	if w.script(script{}); !in(with(mps.PriorityNormal)) {
		t.Error("the daemon has the priority of a change that failed")
	}
}

// TestNoClientPriorities: what an older MPS does not have is refused, and not forgotten.
func TestNoClientPriorities(t *testing.T) {
	w := newWorld(t)
	f := must.Get(state.Open(sysroot.StatePath(w.root)))(t)
	defer f.Close()
	must.Do(t, f.Update(func(m *machine.Machine) error { m.MPS.NoPriorities = true; return nil }))
	s := w.supervisor()
	spec := mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25}
	below := spec
	below.ClientPriority = mps.PriorityBelowNormal
	if _, err := s.Ensure(t.Context(), below); !errors.Is(err, control.ErrNoPriorities) || !strings.Contains(err.Error(), gpuA) {
		t.Errorf("got %v", err)
	}
	w.nothingLeft("gpu-0")
	before := must.Get(s.Ensure(t.Context(), spec))(t)
	expect.Is(t, expect.Err(s.Ensure(t.Context(), below)), control.ErrNoPriorities)
	expect.Same(t, statusOf(t, s, "gpu-0"), before)
}
