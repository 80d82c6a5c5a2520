// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Verdict is what the allocator says.
type Verdict string

const (
	// Fits says that the claims can be allocated on the node.
	Fits Verdict = "Fits"
	// Refused says that they cannot be; other nodes are not concerned.
	Refused Verdict = "Refused"
	// Failed says that something is wrong with a claim, a class or a device. The scheduler gives up for
	// all nodes.
	Failed Verdict = "Failed"
	// TimedOut says that the search took longer than the scheduler searches. It gives up for all nodes,
	// and tries again later.
	TimedOut Verdict = "TimedOut"
	// NotSearched says that the search on another node took too long, or the caller asked to stop.
	NotSearched Verdict = "NotSearched"
)

// Answer is what the allocator says about claims and a node.
type Answer struct {
	Node    string
	Verdict Verdict
	// Results are one per claim, in their order, where they fit. They are nil where Like says
	// that the answer is another node's.
	Results []resourceapi.AllocationResult
	// Like is the name of a node that is the same in everything that matters and that was
	// searched in place of this one.
	Like string
	// Err is what the allocator said, if it said something.
	Err error
}

// OnNodes says on which nodes claims fit, all of them on one. Answers are in the order of nodes. Of nodes that are the same the first is
// searched. When a search exceeds the time limit, nodes that were not reached yet are not searched: neither does the scheduler get any
// further.
func (p *Planner) OnNodes(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) []Answer {
	kinds := p.Kinds(nodes, claims...)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	firsts := make([]Answer, len(kinds))
	inParallel(len(kinds), func(i int) {
		if firsts[i] = p.OnNode(ctx, kinds[i][0], claims); firsts[i].Verdict == TimedOut {
			stop()
		}
	})
	byName := map[string]Answer{}
	for i, kind := range kinds {
		for _, n := range kind {
			a := firsts[i]
			if n != kind[0] {
				a.Node, a.Like, a.Results = n.Name, a.Node, nil
			}
			byName[n.Name] = a
		}
	}
	answers := make([]Answer, 0, len(nodes))
	for _, n := range nodes {
		answers = append(answers, byName[n.Name])
	}
	return answers
}

// Kinds groups nodes that have the same devices, used in the same way, in their order. Attributes that claims compare may have other values,
// if the same devices have the same. Where claims may tell devices of a kind apart, each node is one of its own.
func (p *Planner) Kinds(nodes []*corev1.Node, claims ...*resourceapi.ResourceClaim) [][]*corev1.Node {
	if p.Cluster.tellApart(claims) {
		return slices.Collect(slices.Chunk(nodes, 1))
	}
	keys, compared := make([]uint64, len(nodes)), comparedBy(claims)
	inParallel(len(nodes), func(i int) { keys[i] = p.key(nodes[i], compared) })
	var kinds [][]*corev1.Node
	byKey := map[uint64]int{}
	for i, n := range nodes {
		kind, known := byKey[keys[i]]
		if !known {
			kind, kinds = len(kinds), append(kinds, nil)
			byKey[keys[i]] = kind
		}
		kinds[kind] = append(kinds[kind], n)
	}
	return kinds
}

// inParallel calls f for each number below n, on all processors.
func inParallel(n int, f func(int)) {
	var all errgroup.Group
	all.SetLimit(runtime.GOMAXPROCS(0))
	for i := range n {
		all.Go(func() error {
			f(i)
			return nil
		})
	}
	_ = all.Wait() // none fails
}

// OnNode says whether claims fit on a node, all of them.
func (p *Planner) OnNode(ctx context.Context, node *corev1.Node, claims []*resourceapi.ResourceClaim) Answer {
	a, c := Answer{Node: node.Name}, p.Cluster
	if ctx.Err() != nil {
		a.Verdict, a.Err = NotSearched, context.Cause(ctx)
		return a
	}
	limited, cancel := context.WithTimeout(ctx, p.TimeLimit)
	defer cancel()
	pools := c.poolsOn(node.Name)
	var all []*resourceapi.ResourceSlice
	for _, id := range pools {
		all = append(all, c.pools[id].all...)
	}
	allocator, err := structured.NewAllocator(limited, c.Features, p.allocated(pools), c.classes, all, c.cel)
	if err != nil {
		a.Verdict, a.Err = Failed, fmt.Errorf("make an allocator: %w", err)
		return a
	}
	a.Results, a.Err = allocator.Allocate(limited, node, claims)
	switch {
	case ctx.Err() != nil:
		a.Verdict, a.Err = NotSearched, context.Cause(ctx)
	case errors.Is(a.Err, context.DeadlineExceeded):
		a.Verdict = TimedOut
	case a.Err != nil && !errors.Is(a.Err, structured.ErrFailedAllocationOnNode):
		a.Verdict = Failed
	case a.Err == nil && len(a.Results) == len(claims):
		a.Verdict = Fits
	default:
		a.Verdict = Refused
	}
	return a
}
