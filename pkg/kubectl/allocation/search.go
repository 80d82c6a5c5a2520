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
	"k8s.io/dynamic-resource-allocation/structured"
)

// Verdict is what the allocator says.
type Verdict string

const (
	// Fits: the claims can be allocated on the node.
	Fits Verdict = "Fits"
	// Refused: they cannot; other nodes are not concerned.
	Refused Verdict = "Refused"
	// Failed: something is wrong with a claim, a class or a device. The scheduler gives up for
	// all nodes.
	Failed Verdict = "Failed"
	// TimedOut: the search took longer than the scheduler searches. It gives up for all nodes,
	// and tries again later.
	TimedOut Verdict = "TimedOut"
	// NotSearched: the search on another node took too long, or the caller asked to stop.
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
	q := p.newQuery(claims)
	return q.search(ctx, q.part(ctx, node))
}

// OnNodes says on which nodes claims fit, all of them on one. Answers are in the order of nodes.
// When a search exceeds the time limit, nodes that were not reached yet are not searched:
// neither does the scheduler get any further.
func (p *Planner) OnNodes(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) []Answer {
	q := p.newQuery(claims)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	answers, searched := make([]Answer, len(nodes)), newSearches()
	next := make(chan int)
	var workers sync.WaitGroup
	for range min(len(nodes), runtime.GOMAXPROCS(0)) {
		workers.Go(func() {
			for i := range next {
				answers[i] = searched.answer(ctx, q, nodes[i])
				if answers[i].Verdict == TimedOut {
					stop()
				}
			}
		})
	}
	for i := range nodes {
		next <- i
	}
	close(next)
	workers.Wait()
	return answers
}

// Anywhere reports whether claims fit on one of the nodes, and on which. It stops at the first.
func (p *Planner) Anywhere(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (Answer, bool) {
	q, searched := p.newQuery(claims), newSearches()
	for _, n := range nodes {
		switch a := searched.answer(ctx, q, n); {
		case a.Verdict == Fits && a.Like != "":
			return q.search(ctx, q.part(ctx, n)), true
		case a.Verdict == Fits:
			return a, true
		case a.Verdict != Refused:
			return a, false
		}
	}
	return Answer{}, false
}

// searches are the answers of one query by key. Each is looked for once.
type searches struct {
	mu    sync.Mutex
	known map[uint64]*search
}

type search struct {
	once   sync.Once
	answer Answer
}

func newSearches() *searches { return &searches{known: map[uint64]*search{}} }

func (s *searches) answer(ctx context.Context, q *query, node *corev1.Node) Answer {
	if ctx.Err() != nil {
		return Answer{Node: node.Name, Verdict: NotSearched, Err: context.Cause(ctx)}
	}
	part := q.part(ctx, node)
	s.mu.Lock()
	found := s.known[part.key]
	if found == nil {
		found = &search{}
		s.known[part.key] = found
	}
	s.mu.Unlock()
	found.once.Do(func() { found.answer = q.search(ctx, part) })
	a := found.answer
	if a.Node != node.Name {
		a.Node, a.Like, a.Results = node.Name, a.Node, nil
	}
	return a
}

// search runs the allocator.
func (q *query) search(ctx context.Context, p *part) Answer {
	a := Answer{Node: p.node.Name}
	limited, cancel := context.WithTimeout(ctx, q.timeLimit)
	defer cancel()
	allocator, err := structured.NewAllocator(limited, q.features, q.allocated(p.pools), q.classes, p.slices, q.cel)
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
