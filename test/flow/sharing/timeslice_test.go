// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestIntervals checks that a claim that owns GPUs gets the interval that it asks for on all
// of them, and that no other GPU changes.
func TestIntervals(t *testing.T) {
	t.Parallel()
	for interval, slice := range map[string]int{"Short": harness.ShortSlice, "Medium": harness.MediumSlice, "Long": harness.LongSlice} {
		t.Run(interval, func(t *testing.T) {
			t.Parallel()
			// Somebody has set the last one by hand.
			n := harness.NewNode(t, "l4x3", func(m *machine.Machine) { m.GPUs[2].TimeSlice = harness.MediumSlice })
			p := n.Start(t)
			c := n.Allocate(t, []harness.Device{{GPU: 0}, {GPU: 1}}, harness.TimeSlicingConfig(interval))
			p.MustPrepare(t, c)
			p.MustPrepare(t, c)
			n.WantSlice(t, "prepared", 0, slice)
			n.WantSlice(t, "prepared", 1, slice)
			p.Kill()
			p = n.Start(t)
			p.MustPrepare(t, c)
			p.MustUnprepare(t, c)
			n.WantSlice(t, "released", 0, harness.DefaultSlice)
			n.WantSlice(t, "released", 1, harness.DefaultSlice)
			n.WantSlice(t, "not asked for", 2, harness.MediumSlice)
			n.WantClean(t)
		})
	}
}

// TestIntervalIsLeftAlone checks that a claim that asks for no interval does not change the
// one that an administrator has set.
func TestIntervalIsLeftAlone(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		device  harness.Device
		configs []harness.Config
	}{
		"whole GPU":        {harness.Device{}, nil},
		"default interval": {harness.Device{}, []harness.Config{harness.TimeSlicingConfig("Default")}},
		"time-slice share": {harness.Device{Kind: harness.TimeSlice}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "l4x1", func(m *machine.Machine) { m.GPUs[0].TimeSlice = harness.LongSlice })
			p := n.Start(t)
			c := n.Allocate(t, []harness.Device{test.device}, test.configs...)
			p.MustPrepare(t, c)
			n.WantSlice(t, "prepared", 0, harness.LongSlice)
			p.MustUnprepare(t, c)
			n.WantSlice(t, "released", 0, harness.LongSlice)
		})
	}
}

// TestIntervalOfShares checks that a GPU has the policy's interval from the first share to
// the last.
func TestIntervalOfShares(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, n.Policy(t, "default:\n  timeslice: {clients: 3, interval: Long}\n"))
	var claims []*drapb.Claim
	for range 3 {
		c, _ := p.NewClaim(t, n, harness.Device{Kind: harness.TimeSlice})
		claims = append(claims, c)
		n.WantSlice(t, "shared", 0, harness.LongSlice)
	}
	for _, other := range []harness.Device{{}, {Kind: harness.MPS}, harness.Partition(0, "1g.10gb", 0)} {
		n.WantNoRoom(t, p, other)
	}
	for _, c := range claims {
		n.WantSlice(t, "shared", 0, harness.LongSlice)
		p.MustUnprepare(t, c)
	}
	n.WantSlice(t, "released", 0, harness.DefaultSlice)
	n.WantClean(t)
}

// TestTimeSliceSharesOfPartitions prepares 28 claims on one GPU, four on each of its seven
// partitions, which exist from the first share to the last.
func TestTimeSliceSharesOfPartitions(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, n.Policy(t, harness.PartitionSharesPolicy))
	var claims []*drapb.Claim
	for start := range 7 {
		for range 4 {
			c, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", start).Shared(harness.TimeSlice))
			claims = append(claims, c)
		}
	}
	expect.Len(t, n.Live(t), 7, "live instances")
	n.WantSlice(t, "partitions", 0, harness.DefaultSlice)
	for i, c := range claims {
		p.MustUnprepare(t, c)
		if live, want := n.Live(t), 7-(i+1)/4; len(live) != want {
			t.Fatalf("after %d releases the live instances are %v, want %d", i+1, live, want)
		}
	}
	n.WantClean(t)
}
