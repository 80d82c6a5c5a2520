// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package validation

import (
	"math/rand/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// randomPolicies is how many there are for a node, beside the usual ones.
const randomPolicies = 60

// dice make policies. Their seed is fixed.
type dice struct {
	*rand.Rand
	profiles []string
}

// policies are those of a node without a policy, the built-in one, and random ones, the same in every run.
func policies(node *gpu.Node) []*policy.Policy {
	d := dice{Rand: rand.New(rand.NewPCG(7, 7))}
	if mig := node.GPUs[0].MIG; mig != nil {
		for _, p := range mig.Profiles {
			d.profiles = append(d.profiles, p.Name)
		}
	}
	all := []*policy.Policy{nil, policy.Builtin()}
	for range randomPolicies {
		all = append(all, &policy.Policy{Default: d.offer()})
	}
	return all
}

func one[T any](d dice, of ...T) T { return of[d.IntN(len(of))] }

func (d dice) often() bool { return d.IntN(2) == 0 }

func (d dice) offer() policy.Offer {
	o := policy.Offer{Whole: d.often(), MPS: d.mps(), TimeSlice: d.timeSlice()}
	if d.IntN(3) == 0 {
		return o
	}
	o.Partition = &policy.PartitionOffer{}
	if d.often() {
		o.Partition.Profiles = d.profiles
	}
	for range d.IntN(3) {
		shares := policy.PartitionShares{MPS: d.mps(), TimeSlice: d.timeSlice()}
		for range d.IntN(len(d.profiles) + 1) {
			shares.Profiles = append(shares.Profiles, one(d, d.profiles...))
		}
		o.Partition.Shares = append(o.Partition.Shares, shares)
	}
	return o
}

// mps is nil as often as not.
func (d dice) mps() *policy.MPSOffer {
	if d.often() {
		return nil
	}
	return &policy.MPSOffer{
		Clients: one(d, 1, 2, 3, 4, 7, 48, 60), MemoryOvercommit: d.overcommit(), ReservedMemoryBytes: one[int64](d, 0, 1, 1<<30),
		ServerMemoryBytes: d.bytes(), ContextMemoryBytes: d.bytes(),
	}
}

// timeSlice is nil as often as not.
func (d dice) timeSlice() *policy.TimeSliceOffer {
	if d.often() {
		return nil
	}
	return &policy.TimeSliceOffer{Clients: one(d, 1, 2, 3, 4, 28, 99, 101, 1000, 10000), MemoryOvercommit: d.overcommit()}
}

func (d dice) overcommit() float64 { return one(d, 1, 1.15, 2, 10, 1000) }

func (d dice) bytes() *int64 {
	amount := one[int64](d, -1, 0, 123456789, 1<<40)
	if amount < 0 {
		return nil
	}
	return &amount
}
