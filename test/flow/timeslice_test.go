// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Values of a GPU's time slice.
const (
	defaultSlice = iota
	shortSlice
	mediumSlice
	longSlice
)

func (n *node) wantSlice(t testing.TB, what string, gpu, slice int) {
	t.Helper()
	if got := n.machine(t).GPUs[gpu].TimeSlice; got != slice {
		t.Errorf("%s: GPU %d has the time slice %d, want %d", what, gpu, got, slice)
	}
}

// TestIntervals: a claim that owns GPUs gets the interval that it asks for on all
// of them, and nobody else's changes.
func TestIntervals(t *testing.T) {
	t.Parallel()
	for interval, slice := range map[string]int{"Short": shortSlice, "Medium": mediumSlice, "Long": longSlice} {
		t.Run(interval, func(t *testing.T) {
			t.Parallel()
			// Somebody has set the last one by hand.
			n := newNode(t, "l4x3", func(m *machine.Machine) { m.GPUs[2].TimeSlice = mediumSlice })
			p := n.start(t)
			c := n.claim(t, []request{{gpu: 0}, {gpu: 1}}, timeSlicing(interval))
			p.mustPrepare(t, c)
			p.mustPrepare(t, c)
			n.wantSlice(t, "prepared", 0, slice)
			n.wantSlice(t, "prepared", 1, slice)
			p.kill()
			p = n.start(t)
			p.mustPrepare(t, c)
			p.mustUnprepare(t, c)
			n.wantSlice(t, "released", 0, defaultSlice)
			n.wantSlice(t, "released", 1, defaultSlice)
			n.wantSlice(t, "not asked for", 2, mediumSlice)
			n.wantClean(t)
		})
	}
}

func timeSlicing(interval string) config {
	return config(fmt.Sprintf(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing",`+
		`"timeSlicingConfig":{"interval":%q}}}`, interval))
}

// TestIntervalIsLeftAlone: who does not ask for an interval finds what somebody
// has set, and leaves it.
func TestIntervalIsLeftAlone(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		device  request
		configs []config
	}{
		"whole GPU":        {request{}, nil},
		"default interval": {request{}, []config{timeSlicing("Default")}},
		"time-slice share": {request{kind: asTimeSlice}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "l4x1", func(m *machine.Machine) { m.GPUs[0].TimeSlice = longSlice })
			p := n.start(t)
			c := n.claim(t, []request{test.device}, test.configs...)
			p.mustPrepare(t, c)
			n.wantSlice(t, "prepared", 0, longSlice)
			p.mustUnprepare(t, c)
			n.wantSlice(t, "released", 0, longSlice)
		})
	}
}

// TestIntervalOfShares: the policy's interval is that of the GPU from the first
// share to the last.
func TestIntervalOfShares(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	p := n.start(t, n.policy(t, "default:\n  timeslice: {clients: 3, interval: Long}\n"))
	var claims []*drapb.Claim
	for range 3 {
		c := n.claim(t, []request{{kind: asTimeSlice}})
		p.mustPrepare(t, c)
		claims = append(claims, c)
		n.wantSlice(t, "shared", 0, longSlice)
	}
	for _, other := range []request{{}, {kind: asMPS}, mig(0, "1g.10gb", 0)} {
		n.wantNoRoom(t, p, other)
	}
	for _, c := range claims {
		n.wantSlice(t, "shared", 0, longSlice)
		p.mustUnprepare(t, c)
	}
	n.wantSlice(t, "released", 0, defaultSlice)
	n.wantClean(t)
}

// TestTimeSliceSharesOfPartitions: 28 claims on one GPU, four on each of its seven
// partitions, which come with the first and go with the last.
func TestTimeSliceSharesOfPartitions(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	p := n.start(t, n.policy(t, partitionShares))
	var claims []*drapb.Claim
	for start := range 7 {
		for range 4 {
			c := n.claim(t, []request{mig(0, "1g.10gb", start).shared(asTimeSlice)})
			p.mustPrepare(t, c)
			claims = append(claims, c)
		}
	}
	if live := n.live(t); len(live) != 7 {
		t.Errorf("live instances: %v", live)
	}
	n.wantSlice(t, "partitions", 0, defaultSlice)
	for i, c := range claims {
		p.mustUnprepare(t, c)
		if live, want := n.live(t), 7-(i+1)/4; len(live) != want {
			t.Fatalf("after %d releases the live instances are %v, want %d", i+1, live, want)
		}
	}
	n.wantClean(t)
}
