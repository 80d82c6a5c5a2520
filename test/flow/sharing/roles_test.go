// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"slices"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
)

// TestRoles uses one GPU in every way in turn, with one driver that is never restarted.
// Nothing of one role is left in the next.
func TestRoles(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Run(t, n.Policy(t, harness.PartitionSharesPolicy))
	pristine := n.Snapshot(t)
	roles := []struct {
		name    string
		claims  [][]harness.Device
		configs []harness.Config
	}{
		{"partitions", [][]harness.Device{{harness.Partition(0, "1g.10gb", 0)}, {harness.Partition(0, "3g.40gb", 4)}}, nil},
		{"MPS shares", [][]harness.Device{{{Kind: harness.MPS}}, {{Kind: harness.MPS}}}, nil},
		{"whole", [][]harness.Device{{{}}}, nil},
		{"time-slice shares", [][]harness.Device{{{Kind: harness.TimeSlice}}, {{Kind: harness.TimeSlice}}}, nil},
		{"whole with MPS", [][]harness.Device{{{}}}, []harness.Config{harness.GPUWithMPS}},
		{"whole with an interval", [][]harness.Device{{{}}}, []harness.Config{harness.GPUWithShortSlice}},
		{"MPS shares of partitions", [][]harness.Device{
			{harness.Partition(0, "1g.10gb", 0).Shared(harness.MPS)}, {harness.Partition(0, "1g.10gb", 0).Shared(harness.MPS)}, {harness.Partition(0, "1g.10gb", 1).Shared(harness.MPS)},
		}, nil},
		{"partition with MPS", [][]harness.Device{{harness.Partition(0, "2g.20gb", 0)}}, []harness.Config{harness.PartitionWithMPS}},
	}
	for range 2 {
		for _, role := range roles {
			var claims []*drapb.Claim
			for _, devices := range role.claims {
				c := n.Allocate(t, devices, role.configs...)
				ids := p.MustPrepare(t, c)
				wantOutput(t, n, n.Container(t, ids...), nil, "info")
				claims = append(claims, c)
			}
			p.MustUnprepare(t, claims...)
			p.UntilSnapshot(t, n, pristine)
		}
	}
}

// TestPolicyChanges checks that a device that the policy no longer offers stays published,
// tainted, as long as a claim may have it, and that its claims are not affected.
func TestPolicyChanges(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	flag := n.Policy(t, "default: {kinds: [mps, timeslice]}\n")
	p := n.Run(t, append(slices.Clip(harness.Frequent), flag)...)
	base := n.DeviceName(t, 0, "", 0)
	share, slice := base+"-mps", base+"-timeslice"
	wantOffered(t, n, p, share, slice)
	c, ids := p.NewClaim(t, n, harness.Device{Kind: harness.MPS})
	u := n.StartProgram(t, ids...)

	n.Policy(t, "default: {kinds: [gpu, timeslice]}\n")
	p.UntilTainted(t, n, "withdrawn", []string{share})
	wantOffered(t, n, p, base, share, slice)
	expect.Do(t, u.Check())
	p.MustPrepare(t, c)
	// The scheduler may have allocated a share just before.
	late, _ := p.NewClaim(t, n, harness.Device{Kind: harness.MPS})
	p.MustUnprepare(t, late)

	n.Policy(t, "default: {kinds: [mps, timeslic]}\n")
	p.UntilEvent(t, n, "SharingPolicyInvalid", "timeslic")
	wantOffered(t, n, p, base, share, slice)
	n.Policy(t, "default: {kinds: [mps]}\n")
	p.UntilTainted(t, n, "withdrawn", []string{base, slice})
	u.Stop()
	p.MustUnprepare(t, c)
	p.UntilClean(t, n)
}

// wantOffered waits until these devices are published, and nothing else.
func wantOffered(t *testing.T, n *harness.Node, p *harness.Driver, names ...string) {
	t.Helper()
	slices.Sort(names)
	p.Until(t, "the published devices", func(context.Context) error {
		if got, _ := n.Offered(""); !slices.Equal(got, names) {
			return errors.New("they are not as wanted")
		}
		return nil
	})
}
