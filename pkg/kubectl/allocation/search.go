// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
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

// OnNode says whether claims fit on a node, all of them.
func (p *Planner) OnNode(ctx context.Context, node *corev1.Node, claims []*resourceapi.ResourceClaim) Answer {
	q := newQuery(p, claims)
	return q.search(ctx, q.part(ctx, node))
}

// OnNodes says on which nodes claims fit, all of them on one. Answers are in the order of nodes. Of nodes that are the same the first is
// searched. When a search exceeds the time limit, nodes that were not reached yet are not searched: neither does the scheduler get any
// further.
func (p *Planner) OnNodes(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) []Answer {
	q := newQuery(p, claims)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	kinds := q.kinds(ctx, nodes)
	answers := make([]Answer, len(nodes))
	inParallel(len(kinds), func(i int) {
		a := q.search(ctx, kinds[i].first)
		if a.Verdict == TimedOut {
			stop()
		}
		for _, n := range kinds[i].nodes {
			answers[n] = a.of(nodes[n])
		}
	})
	return answers
}

// kind is a group of nodes for which the allocator's answer must be the same.
type kind struct {
	first *part
	// nodes are all of them, by index.
	nodes []int
}

// kinds groups nodes, in their order.
func (q *query) kinds(ctx context.Context, nodes []*corev1.Node) []*kind {
	keys := make([]uint64, len(nodes))
	var mu sync.Mutex
	// firsts are the indices and parts of the first nodes of each key that were found yet: the other parts need not be kept.
	type indexed struct {
		index int
		part  *part
	}
	firsts := map[uint64]indexed{}
	inParallel(len(nodes), func(i int) {
		p := q.part(ctx, nodes[i])
		keys[i] = p.key
		mu.Lock()
		defer mu.Unlock()
		if known, has := firsts[p.key]; !has || i < known.index {
			firsts[p.key] = indexed{i, p}
		}
	})
	var out []*kind
	byKey := map[uint64]*kind{}
	for i, key := range keys {
		if byKey[key] == nil {
			byKey[key] = &kind{first: firsts[key].part}
			out = append(out, byKey[key])
		}
		byKey[key].nodes = append(byKey[key].nodes, i)
	}
	return out
}

// of returns the answer for a node that is the same as the one that was searched.
func (a Answer) of(node *corev1.Node) Answer {
	if a.Node != node.Name {
		a.Node, a.Like, a.Results = node.Name, a.Node, nil
	}
	return a
}

// inParallel calls f for each number below n, on all processors.
func inParallel(n int, f func(int)) {
	next := make(chan int)
	var workers sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		workers.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	workers.Wait()
}

// Anywhere reports whether claims fit on one of the nodes, and on which. It stops at the first.
func (p *Planner) Anywhere(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (Answer, bool) {
	q, refused := newQuery(p, claims), sets.New[uint64]()
	for _, n := range nodes {
		part := q.part(ctx, n)
		if refused.Has(part.key) {
			continue
		}
		a := q.search(ctx, part)
		if a.Verdict != Refused {
			return a, a.Verdict == Fits
		}
		refused.Insert(part.key)
	}
	return Answer{}, false
}

// search runs the allocator.
func (q *query) search(ctx context.Context, p *part) Answer {
	a := Answer{Node: p.node.Name}
	if ctx.Err() != nil {
		a.Verdict, a.Err = NotSearched, context.Cause(ctx)
		return a
	}
	limited, cancel := context.WithTimeout(ctx, q.planner.TimeLimit)
	defer cancel()
	allocator, err := structured.NewAllocator(limited, q.cluster.Features, q.planner.held.allocated(p.pools), q.cluster.classes, p.slices, q.cluster.cel)
	if err != nil {
		a.Verdict, a.Err = Failed, fmt.Errorf("make an allocator: %w", err)
		return a
	}
	a.Results, a.Err = allocator.Allocate(limited, p.node, q.claims)
	switch {
	case ctx.Err() != nil:
		a.Verdict, a.Err = NotSearched, context.Cause(ctx)
	case errors.Is(a.Err, context.DeadlineExceeded):
		a.Verdict = TimedOut
	case errors.Is(a.Err, structured.ErrFailedAllocationOnNode):
		a.Verdict = Refused
	case a.Err != nil:
		a.Verdict = Failed
	case len(a.Results) == len(q.claims):
		a.Verdict = Fits
	default:
		a.Verdict = Refused
	}
	return a
}
