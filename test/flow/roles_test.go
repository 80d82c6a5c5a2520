// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"slices"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// TestRoles: one GPU is everything in turn, as claims want it, with one driver that
// is never restarted. Nothing of one role is there in the next.
func TestRoles(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	n.startSupervisor(t)
	p := n.start(t, n.policy(t, partitionShares))
	p.ready(t)
	pristine := n.traces(t)
	roles := []struct {
		name    string
		claims  [][]request
		configs []config
	}{
		{"partitions", [][]request{{mig(0, "1g.10gb", 0)}, {mig(0, "3g.40gb", 4)}}, nil},
		{"MPS shares", [][]request{{{kind: asMPS}}, {{kind: asMPS}}}, nil},
		{"whole", [][]request{{{}}}, nil},
		{"time-slice shares", [][]request{{{kind: asTimeSlice}}, {{kind: asTimeSlice}}}, nil},
		{"whole with MPS", [][]request{{{}}}, []config{gpuMPS}},
		{"whole with an interval", [][]request{{{}}}, []config{gpuShort}},
		{"MPS shares of partitions", [][]request{
			{mig(0, "1g.10gb", 0).shared(asMPS)}, {mig(0, "1g.10gb", 0).shared(asMPS)}, {mig(0, "1g.10gb", 1).shared(asMPS)},
		}, nil},
		{"partition with MPS", [][]request{{mig(0, "2g.20gb", 0)}}, []config{migMPS}},
	}
	for range 2 {
		for _, role := range roles {
			var claims []*drapb.Claim
			for _, devices := range role.claims {
				c := n.claim(t, devices, role.configs...)
				ids := p.mustPrepare(t, c)
				n.wantSays(t, n.container(t, ids...), nil, "info")
				claims = append(claims, c)
			}
			p.mustUnprepare(t, claims...)
			p.untilLeft(t, n, pristine)
		}
	}
}

// TestPolicyChanges: a device that the policy does not offer any more stays, and is
// tainted, while a claim may have it. What claims have works on.
func TestPolicyChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	n.startSupervisor(t)
	flag := n.policy(t, "default: {kinds: [mps, timeslice]}\n")
	p := n.start(t, append(slices.Clip(frequent), flag)...)
	p.ready(t)
	base := n.device(t, 0, "", 0)
	share, slice := base+"-mps", base+"-timeslice"
	n.wantOffered(t, p, share, slice)
	c := n.claim(t, []request{{kind: asMPS}})
	ids := p.mustPrepare(t, c)
	u := n.use(t, ids...)

	n.policy(t, "default: {kinds: [gpu, timeslice]}\n")
	p.untilTainted(t, n, "withdrawn", []string{share})
	n.wantOffered(t, p, base, share, slice)
	if err := u.works(); err != nil {
		t.Error(err)
	}
	p.mustPrepare(t, c)
	// The scheduler may have allocated a share just before.
	late := n.claim(t, []request{{kind: asMPS}})
	p.mustPrepare(t, late)
	p.mustUnprepare(t, late)

	n.policy(t, "default: {kinds: [mps, timeslic]}\n")
	p.untilEvent(t, n, "SharingPolicyInvalid", "timeslic")
	n.wantOffered(t, p, base, share, slice)
	n.policy(t, "default: {kinds: [mps]}\n")
	p.untilTainted(t, n, "withdrawn", []string{base, slice})
	u.leave()
	p.mustUnprepare(t, c)
	p.untilClean(t, n)
}

// wantOffered waits until these devices are published, and nothing else.
func (n *node) wantOffered(t *testing.T, p *process, names ...string) {
	t.Helper()
	slices.Sort(names)
	p.until(t, "the published devices", func(context.Context) error {
		if got, _ := n.offered(""); !slices.Equal(got, names) {
			return errors.New("they are not as wanted")
		}
		return nil
	})
}
