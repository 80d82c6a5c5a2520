// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// Kind is that of the objects that explain prints.
const Kind = "Explanation"

// searchBudget is how long is looked for what would help, beyond the verdict.
const searchBudget = 10 * time.Second

// Explainer explains pods and claims of one Snapshot.
type Explainer struct {
	planner *allocation.Planner
	filter  *allocation.NodeFilter
	model   *fleet.Model
	now     time.Time
	// budget is how long is looked for what would help, and tryFor how long one change is
	// searched for on one node: one after which the search is hard is no help.
	budget, tryFor time.Duration
	// kinds returns all nodes, those of a kind together.
	kinds func() [][]*corev1.Node
	// AdminAllowed reports whether a namespace may use admin access, and whether that is known.
	// It may be nil.
	AdminAllowed func(namespace string) (allowed, known bool)
	// Events are those of the pod and its claims that are asked for. It may be nil.
	Events func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error)
	// Volume reports whether a PersistentVolumeClaim is there and, in a word or two, why it may keep a pod waiting. It may be nil.
	Volume func(namespace, name string) (is bool, doubt string)
	// Refused says why the API server would refuse an object, or why that is not known. It may be nil.
	Refused func(object *unstructured.Unstructured) (refused, doubt string)
}

// New returns an Explainer.
func New(ctx context.Context, s *fleet.Snapshot, driver string, now time.Time, options ...allocation.Option) *Explainer {
	x := &Explainer{now: now, budget: searchBudget, tryFor: tryFor}
	var parts sync.WaitGroup
	parts.Go(func() { x.model = fleet.New(s, driver) })
	parts.Go(func() { x.filter = allocation.NewNodeFilter(s) })
	x.planner = allocation.New(s, options...)
	parts.Wait()
	x.kinds = sync.OnceValue(func() [][]*corev1.Node { return x.planner.Kinds(ctx, x.planner.Cluster.Nodes) })
	return x
}

// found is what a look at one side of a sight finds.
type found struct {
	reasons []Reason
	// unseen could contradict that it can be allocated, and notes cannot.
	unseen, notes []string
}

func (x *Explainer) begin(kind string, o metav1.Object) *Explanation {
	e := &Explanation{TypeMeta: printer.TypeMeta(Kind), Subject: Subject{kind, o.GetNamespace(), o.GetName()}, Assumptions: x.planner.Cluster.Assumptions}
	for _, m := range x.model.Missing {
		e.Notes = append(e.Notes, m.String())
	}
	return e
}

// take adds what was found. What does not fit as far as can be seen does not fit, whatever else there is.
func (e *Explanation) take(f found) {
	e.Reasons, e.Unseen, e.Notes = append(e.Reasons, f.reasons...), append(e.Unseen, f.unseen...), append(e.Notes, f.notes...)
	if len(f.reasons) > 0 {
		e.Verdict, e.FitsOn = Waits, nil
	}
}

// settle makes a verdict unknown that something could contradict which was not looked at, and puts the most informative reason first, and
// what helps with it.
func (e *Explanation) settle() *Explanation {
	if len(e.Unseen) > 0 && (e.Verdict == Allocatable || e.Verdict == "") {
		e.Verdict, e.FitsOn = Unknown, nil
	}
	sortReasons(e.Reasons)
	var help []Suggestion
	for i := range e.Reasons {
		help, e.Reasons[i].help = append(help, e.Reasons[i].help...), nil
	}
	e.Suggestions = append(help, e.Suggestions...)
	return e
}

// Claim explains a claim.
func (x *Explainer) Claim(ctx context.Context, c *resourceapi.ResourceClaim) *Explanation {
	e, s := x.begin("ResourceClaim", c), &sight{x: x, own: []*resourceapi.ResourceClaim{c}, nodes: x.planner.Cluster.Nodes}
	if c.Status.Allocation != nil {
		e.Verdict, e.Allocations = Allocated, allocations(s)
		return e
	}
	if e.take(found{reasons: deleted(c)}); e.Verdict != Waits {
		allocate(ctx, s, e)
	}
	if e.settle(); e.Verdict == Allocatable {
		e.Notes = append(e.Notes, "A claim is allocated when a pod that refers to it is scheduled.")
	}
	return e
}

// Pod explains a pod.
func (x *Explainer) Pod(ctx context.Context, pod *corev1.Pod) *Explanation {
	e := x.begin("Pod", pod)
	if fleet.Ended(pod) {
		e.Verdict = Finished
		return e
	}
	s := x.look(pod)
	e.take(references(s))
	if !scheduled(pod) {
		e.take(unusable(s))
		e.take(unserved(s))
	}
	switch {
	case e.Verdict == Waits || len(e.Unseen) > 0:
	case len(s.own) == 0 && s.extended(nil) == nil && pod.Status.ExtendedResourceClaimStatus == nil:
		e.Verdict = NoDevices
	case scheduled(pod):
		started(s, e)
	default:
		s.place()
		if allocate(ctx, s, e) {
			e.take(kubelets(s, e.FitsOn))
			e.take(rollout(s, e.InTheWay))
			e.take(priority(s, e.InTheWay))
			e.take(volumes(s))
			e.take(controllers(s, e.Verdict == Allocatable))
			if e.Verdict == Allocatable {
				e.take(unexamined(s))
			}
			e.take(gates(s))
		}
		e.Allocations = allocations(s)
		e.settle()
		e.take(schedulerSays(s, e.Verdict == Allocatable))
		return e
	}
	return e.settle()
}

// scheduled reports whether a pod has a node. In a file that is a wish.
func scheduled(pod *corev1.Pod) bool {
	return pod.Spec.NodeName != "" && (pod.Status.Phase != "" || pod.Status.StartTime != nil)
}

// allocate asks the allocator for what has no devices yet. It reports whether the allocator could be asked.
func allocate(ctx context.Context, s *sight, e *Explanation) bool {
	if s.hides(fleet.ResourceSlices, "") || s.hides(fleet.ResourceClasses, "") {
		// The notes say which right is missing.
		e.Verdict = Unknown
		return false
	}
	e.take(hidden(s))
	for _, c := range s.own {
		if c.Status.Allocation == nil {
			s.claims = append(s.claims, complete(c))
		}
	}
	if e.take(refusedClaims(s)); e.Verdict != Waits {
		e.take(classes(ctx, s))
	}
	if e.Verdict == Waits {
		return false
	}
	decide(ctx, s, e)
	return true
}

// decide takes the allocator's answer, and says why it refuses, who is in the way, and what would help.
func decide(ctx context.Context, s *sight, e *Explanation) {
	answers := s.search(ctx, s.x.planner, s.nodes)
	broken := slices.IndexFunc(answers, func(a allocation.Answer) bool {
		return a.Verdict == allocation.Failed || a.Verdict == allocation.TimedOut
	})
	for _, a := range answers {
		if broken < 0 && a.Verdict == allocation.Fits {
			e.FitsOn = append(e.FitsOn, a.Node)
		}
	}
	if len(e.FitsOn) > 0 {
		e.Verdict = Allocatable
		e.take(remarks(s))
		return
	}
	e.Verdict = Waits
	limited, cancel := context.WithTimeout(ctx, s.x.budget)
	defer cancel()
	h := newHelper(limited, s)
	if broken >= 0 {
		e.take(found{reasons: []Reason{gaveUp(s, &answers[broken])}})
	} else {
		j := newJudge(s.x.planner)
		if e.take(found{reasons: refusals(ctx, s, j, h.empty)}); slices.ContainsFunc(e.Reasons, isTaken) {
			held, f := inTheWay(ctx, s, j)
			for _, node := range slices.Sorted(maps.Keys(held)) {
				e.InTheWay = append(e.InTheWay, held[node]...)
			}
			h.held = held
			e.take(f)
		}
	}
	e.Suggestions = h.suggest(limited)
	if limited.Err() != nil && ctx.Err() == nil {
		e.Notes = append(e.Notes, fmt.Sprintf("Looking for what would help was stopped after %s.", s.x.budget))
	}
}
