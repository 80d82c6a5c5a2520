// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
)

// queue is the cluster with the pods of a file that come first. Each has what it could get, whether or not something else than devices keeps
// it waiting now.
type queue struct {
	planner *allocation.Planner
	// pods is how many these are.
	pods int
	// shared are claims that several pods may name, as the first of them has got them.
	shared map[string]*resourceapi.ResourceClaim
	// apart says that pods like one have claims of their own, whatever that one names.
	apart bool
	// lost are objects of which it is not known what they take.
	lost []string
}

// lose notes that it is not known what an object takes.
func (q *queue) lose(pod *corev1.Pod) {
	if q != nil {
		q.lost = append(q.lost, pod.Name)
	}
}

// replicas says how many pods like the one that is explained fit at once, of those that a workload adds, and whether they fit beside the pods
// that come before them in a file.
func replicas(ctx context.Context, s *sight, w *workload) {
	n, before := w.added(), queue{planner: s.x.planner}
	if s.x.file != nil {
		before = *s.x.file
	}
	switch {
	case w.stay > 0 && !w.same:
		s.x.file.lose(s.pod)
		updated(s, w)
		return
	case n == 1 && s.x.file == nil:
		return
	}
	limited, cancel := context.WithTimeout(ctx, s.x.budget)
	defer cancel()
	after, fit, known := s.fill(limited, before, n)
	beside := known && fit == n && len(before.lost) == 0
	if s.x.file != nil {
		if s.x.file = &after; !known || w.everywhere {
			after.lose(s.pod)
		}
	}
	if s.Verdict == Waits {
		return
	}
	fit, known = s.alone(limited, before, n, fit, known)
	if atOnce(s, w, n, fit, known) && !beside {
		before.addUnseen(s)
	}
}

// alone returns how many pods fit without those that come before them in a file, where not all fit beside these.
func (s *sight) alone(ctx context.Context, before queue, n, fit int, known bool) (int, bool) {
	switch {
	case known && fit == n:
	case n == 1:
		return 1, true // that it fits alone is known
	case before.pods > 0:
		_, fit, known = s.fill(ctx, queue{planner: s.x.planner}, n)
	}
	return fit, known
}

// addUnseen leaves open whether what fits alone does so beside what comes first.
func (q *queue) addUnseen(s *sight) {
	text := "whether it fits beside the other objects of the file, which come first"
	switch {
	case len(q.lost) > 0:
		text += ": what " + strings.Join(q.lost, ", ") + " would take is unknown"
	case q.pods == 0:
		return
	}
	s.addUnseen("%s", text)
}

// updated leaves open what comes after the first new pod of an update that ends old ones one after the other.
func updated(s *sight, w *workload) {
	switch n := w.replicas; {
	case s.Verdict == Waits || n == 1:
	case n > len(w.old):
		s.addUnseen("whether all %d pods of the workload fit, which has %d", n, len(w.old))
	default:
		s.note("This is one pod of %d: whether the others fit, too, is not looked at.", n)
	}
}

// atOnce says how many of the pods that a workload adds fit at once. It reports whether that may be all.
func atOnce(s *sight, w *workload, n, fit int, known bool) bool {
	which := ""
	if w.same {
		which = " without a node"
	}
	switch {
	case !known:
		s.addUnseen("whether all %d pods%s of the workload fit: the search took too long", n, which)
		return false
	case fit < n:
		s.because(Reason{Cause: TooManyPods, help: []Suggestion{suggest(LowerCount, "with %d in place of %d pods", w.replicas-n+fit, w.replicas)}},
			"%s%d of the workload's %d pods%s %s at once", s.atMost(), fit, n, which, plural(fit, "fits", "fit"))
		return false
	case n > 1:
		quotas(s, n)
		fit, but := s.may("fit")
		s.note("All %d pods%s of the workload %s at once%s.", n, which, fit, but)
	}
	return true
}

// fill adds up to n pods like the one that is explained, and returns how many there is room for, if that could be found out.
func (s *sight) fill(ctx context.Context, q queue, n int) (after queue, fit int, known bool) {
	q.planner, q.shared = s.x.hasty(q.planner), maps.Clone(q.shared)
	for _, node := range s.nodes {
		for ; fit < n && len(q.planner.Obstacles(s.pod, node)) == 0; fit++ {
			a, claims, here := s.next(ctx, &q, node)
			if !here || a.Verdict == allocation.Refused {
				break
			} else if a.Verdict != allocation.Fits {
				return q, fit, false
			}
			got := allocation.Allocated(claims, a.Results)
			for _, c := range got {
				if s.shares(c) && !q.apart {
					q.share(c)
				}
			}
			q.planner = q.planner.With(s.pod, node.Name, got...)
			q.pods++
		}
	}
	return q, fit, true
}

// next asks the allocator for what one more pod needs on a node, unless a claim that it shares has its devices elsewhere.
func (s *sight) next(ctx context.Context, q *queue, node *corev1.Node) (a allocation.Answer, claims []*resourceapi.ResourceClaim, here bool) {
	for _, c := range s.wanted(node) {
		if has := q.shared[c.Namespace+"/"+c.Name]; has == nil {
			claims = append(claims, c)
		} else if isElsewhere(s.x.planner.Cluster, has, node) {
			return a, nil, false
		}
	}
	return q.planner.OnNode(ctx, node, claims), claims, true
}

// shares reports whether the pod names a claim, so that others can name it, too.
func (s *sight) shares(c *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(s.references, func(r allocation.PodClaim) bool { return r.Template == "" && r.Claim != nil && r.Claim.Name == c.Name })
}

func (q *queue) share(c *resourceapi.ResourceClaim) {
	if q.shared == nil {
		q.shared = map[string]*resourceapi.ResourceClaim{}
	}
	q.shared[c.Namespace+"/"+c.Name] = c
}

// quotas leaves open whether quotas allow several pods: the API server was asked for one of them.
func quotas(s *sight, n int) {
	if s.x.Quotas == nil {
		return
	}
	switch names, err := s.x.Quotas(s.pod.Namespace); {
	case err != nil:
		s.addUnseen("whether a quota allows all %d pods: %v", n, err)
	case len(names) > 0:
		s.addUnseen("whether quota %s allows all %d pods", strings.Join(names, ", "), n)
	}
}
