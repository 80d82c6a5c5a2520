// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
)

// replicas says how many pods like the one that is explained fit at once, of those that a workload has, and whether they fit beside the pods
// that come before them in a file.
func replicas(ctx context.Context, s *sight, w *workload) {
	n := w.replicas
	if s.Verdict == Waits {
		return
	}
	shared := slices.ContainsFunc(s.references, func(c allocation.PodClaim) bool { return !c.New })
	switch {
	case len(w.old) > 0 && n > len(w.old):
		s.addUnseen("whether all %d pods of the workload fit, which has %d", n, len(w.old))
		return
	case len(w.old) > 0 || shared:
		// An update ends a pod for each new one, and who shares a claim shares its devices.
		if n > 1 {
			s.note("This is one pod of %d: whether the others fit, too, is not looked at.", n)
		}
		return
	}
	limited, cancel := context.WithTimeout(ctx, s.x.budget)
	defer cancel()
	_, fit, known := s.fill(limited, s.x.planner, n)
	switch {
	case !known:
		s.addUnseen("whether all %d pods of the workload fit: the search took too long", n)
		return
	case fit < n:
		s.because(Reason{Cause: TooManyPods, help: []Suggestion{suggest(LowerCount, "with %d in place of %d pods", fit, n)}},
			"%s%d of the workload's %d pods %s at once", s.atMost(), fit, n, plural(fit, "fits", "fit"))
		return
	case n > 1:
		quotas(s, n)
		fit, but := s.may("fit")
		s.note("All %d pods of the workload %s at once%s.", n, fit, but)
	}
	if s.x.inFile == nil {
		return
	}
	after, fit, known := s.fill(limited, s.x.inFile, n)
	if s.x.inFile = after; !known || fit < n {
		s.addUnseen("whether it fits beside the other objects of the file, which come first")
	}
}

// fill places up to n pods like the one that is explained, and returns the Planner for the time after, and how many there is room for, if that
// could be found out.
func (s *sight) fill(ctx context.Context, planner *allocation.Planner, n int) (after *allocation.Planner, fit int, known bool) {
	planner = s.x.hasty(planner)
	for _, node := range s.nodes {
		for ; fit < n && len(planner.Obstacles(s.pod, node)) == 0; fit++ {
			a := planner.OnNode(ctx, node, s.wanted(node))
			if a.Verdict == allocation.Refused {
				break
			} else if a.Verdict != allocation.Fits {
				return planner, fit, false
			}
			planner = planner.With(s.pod, node.Name, allocation.Allocated(s.wanted(node), a.Results)...)
		}
	}
	return planner, fit, true
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
