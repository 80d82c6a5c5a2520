// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// Kind is that of the objects that explain prints.
const Kind = "Explanation"

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
	x.kinds = sync.OnceValue(func() [][]*corev1.Node { return x.planner.Kinds(ctx, x.planner.Nodes()) })
	return x
}

// inquiry is one explanation that is being made.
type inquiry struct {
	*Explainer
	*Explanation

	// pod is nil where a claim is asked for alone.
	pod *corev1.Pod
	// claims are those that have to be allocated together.
	claims []*resourceapi.ResourceClaim
	// own are all claims of the pod, those that have devices among them.
	own []*resourceapi.ResourceClaim
	// nodes are those that nothing but devices keeps the pod from, and excluded the others.
	nodes    []*corev1.Node
	excluded []exclusion
	answers  []allocation.Answer
	// holdings are the claims that are in the way, by node.
	holdings map[string][]*holding
}

type exclusion struct {
	node      *corev1.Node
	obstacles []allocation.Obstacle
}

func (x *Explainer) begin(kind, namespace, name string) *inquiry {
	q := &inquiry{Explainer: x, Explanation: &Explanation{TypeMeta: printer.TypeMeta(Kind), Subject: Subject{kind, namespace, name}}}
	q.Assumptions = x.planner.Assumptions()
	for _, m := range x.model.Missing {
		q.Notes = append(q.Notes, m.String())
	}
	return q
}

// Claim explains a claim.
func (x *Explainer) Claim(ctx context.Context, c *resourceapi.ResourceClaim) *Explanation {
	q := x.begin("ResourceClaim", c.Namespace, c.Name)
	if c.Status.Allocation != nil {
		q.Verdict = Allocated
		q.describe(c)
		return q.Explanation
	}
	if q.deleted(c); len(q.Reasons) > 0 {
		q.Verdict = Waits
		return q.Explanation
	}
	if q.blind() {
		return q.Explanation
	}
	q.hide()
	q.nodes = x.planner.Nodes()
	if q.check(ctx, complete(c)) {
		q.decide(ctx)
	}
	if q.settle(); q.Verdict == Allocatable {
		q.Notes = append(q.Notes, "A claim is allocated when a pod that refers to it is scheduled.")
	}
	return q.Explanation
}

// Pod explains a pod.
func (x *Explainer) Pod(ctx context.Context, pod *corev1.Pod) *Explanation {
	q := x.begin("Pod", pod.Namespace, pod.Name)
	q.pod = pod
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		q.Verdict = Finished
		return q.Explanation
	}
	claims := q.podClaims()
	q.own = claims
	if !scheduled(pod) {
		q.unserved()
	}
	switch {
	case q.Verdict == Unknown:
		return q.Explanation
	case len(q.Reasons) > 0:
		q.Verdict = Waits
		return q.Explanation
	case len(claims) == 0 && x.planner.ExtendedClaim(pod, nil) == nil && pod.Status.ExtendedResourceClaimStatus == nil:
		q.Verdict = NoDevices
		return q.Explanation
	case scheduled(pod):
		q.scheduled(claims)
		return q.Explanation
	}
	if q.blind() {
		return q.Explanation
	}
	q.hide()
	q.place(claims)
	for _, c := range claims {
		if c.Status.Allocation == nil && !q.check(ctx, complete(c)) {
			return q.Explanation
		}
		if c.Status.Allocation != nil {
			q.describe(c)
		}
	}
	q.decide(ctx)
	q.kubelets()
	q.rollout()
	q.priority()
	q.outside()
	q.settle()
	q.sayScheduler()
	return q.Explanation
}

// scheduled reports whether a pod has a node. In a file that is a wish.
func scheduled(pod *corev1.Pod) bool {
	return pod.Spec.NodeName != "" && (pod.Status.Phase != "" || pod.Status.StartTime != nil)
}

// place tells the nodes apart that the pod may run on, devices aside.
func (q *inquiry) place(claims []*resourceapi.ResourceClaim) {
	for _, n := range q.planner.Nodes() {
		obstacles := q.filter.Obstacles(q.planner, q.pod, n)
		for _, c := range claims {
			if c.Status.Allocation == nil || c.Status.Allocation.NodeSelector == nil {
				continue
			}
			if q.planner.Unread(n) && selectsLabels(c.Status.Allocation.NodeSelector) {
				continue
			}
			if matches, err := nodeaffinity.NewLazyErrorNodeSelector(c.Status.Allocation.NodeSelector).Match(n); err != nil || !matches {
				obstacles = append(obstacles, allocation.Obstacle{Kind: byClaim, Text: fmt.Sprintf("claim %s has its devices on another node", c.Name)})
			}
		}
		if len(obstacles) > 0 {
			q.excluded = append(q.excluded, exclusion{n, obstacles})
			continue
		}
		q.nodes = append(q.nodes, n)
	}
}

// selectsLabels reports whether a selector looks at more than names of nodes.
func selectsLabels(s *corev1.NodeSelector) bool {
	return slices.ContainsFunc(s.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool { return len(t.MatchExpressions) > 0 })
}

// byClaim is an obstacle that filters of nodes do not know.
const byClaim allocation.ObstacleKind = "ClaimElsewhere"

// blind reports whether devices or classes cannot be read. The notes say which right is missing.
func (q *inquiry) blind() bool {
	if q.unreadable(fleet.ResourceSlices, "") || q.unreadable(fleet.ResourceClasses, "") {
		q.Verdict = Unknown
		return true
	}
	return false
}

func (q *inquiry) unreadable(resource, namespace string) bool {
	return slices.ContainsFunc(q.model.Missing, func(m fleet.Missing) bool { return m.Resource == resource && m.Namespace == namespace })
}

// claimsFor returns the claims that have to be allocated on a node.
func (q *inquiry) claimsFor(n *corev1.Node) []*resourceapi.ResourceClaim {
	if q.pod == nil {
		return q.claims
	}
	if extended := q.planner.ExtendedClaim(q.pod, n); extended != nil {
		return append(slices.Clip(q.claims), extended)
	}
	return q.claims
}

// search asks the allocator about nodes. Nodes whose device plugins offer what the pod wants
// have other claims.
func (q *inquiry) search(ctx context.Context, nodes []*corev1.Node) []allocation.Answer {
	groups := map[string][]*corev1.Node{}
	for _, n := range nodes {
		groups[requestNames(q.claimsFor(n))] = append(groups[requestNames(q.claimsFor(n))], n)
	}
	byName := map[string]allocation.Answer{}
	for _, group := range groups {
		claims := q.claimsFor(group[0])
		if len(claims) == 0 {
			for _, n := range group {
				byName[n.Name] = allocation.Answer{Node: n.Name, Verdict: allocation.Fits}
			}
			continue
		}
		for _, a := range q.planner.OnNodes(ctx, group, claims) {
			byName[a.Node] = a
		}
	}
	out := make([]allocation.Answer, 0, len(nodes))
	for _, n := range nodes {
		out = append(out, byName[n.Name])
	}
	return out
}

func requestNames(claims []*resourceapi.ResourceClaim) string {
	var names []string
	for _, c := range claims {
		for _, r := range c.Spec.Devices.Requests {
			names = append(names, r.Name)
		}
	}
	return strings.Join(names, " ")
}

// decide asks the allocator, and says why it refuses.
func (q *inquiry) decide(ctx context.Context) {
	q.answers = q.search(ctx, q.nodes)
	broken := slices.IndexFunc(q.answers, func(a allocation.Answer) bool {
		return a.Verdict == allocation.Failed || a.Verdict == allocation.TimedOut
	})
	for _, a := range q.answers {
		if a.Verdict == allocation.Fits {
			q.FitsOn = append(q.FitsOn, a.Node)
		}
	}
	switch {
	case broken >= 0:
		q.Verdict = Waits
		q.broken(&q.answers[broken])
	case len(q.FitsOn) > 0:
		q.Verdict = Allocatable
		q.remark()
		return
	default:
		q.Verdict = Waits
		q.refused(ctx)
	}
	limited, cancel := context.WithTimeout(ctx, q.budget)
	defer cancel()
	q.suggest(limited)
	if limited.Err() != nil && ctx.Err() == nil {
		q.Notes = append(q.Notes, fmt.Sprintf("Looking for what would help was stopped after %s.", q.budget))
	}
}

// remark says what a claim gets that may not be what was meant.
func (q *inquiry) remark() {
	for _, c := range q.claims {
		for _, a := range asksOf(c) {
			if *a.capacity == nil {
				continue
			}
			memory, has := (*a.capacity).Requests[fleet.CapacityMemory]
			if has && memory.Value() < 1<<20 {
				q.Notes = append(q.Notes, fmt.Sprintf("Request %s of claim %s asks for %s bytes of memory, which is rounded up to the smallest share: was a unit such as Gi meant?", a.name, c.Name, memory.String()))
			}
		}
	}
}

// sayScheduler notes what the scheduler itself said last.
func (q *inquiry) sayScheduler() {
	for _, c := range q.pod.Status.Conditions {
		if c.Type != corev1.PodScheduled || c.Status != corev1.ConditionFalse || c.Message == "" {
			continue
		}
		q.Notes = append(q.Notes, "The scheduler said: "+c.Message)
		if q.Verdict == Allocatable {
			q.Notes = append(q.Notes, "Its devices could be allocated now: the scheduler has not tried again yet.")
		}
	}
}

// gated says that the scheduler does not look at the pod, whatever there is.
func (q *inquiry) gated() {
	if len(q.pod.Spec.SchedulingGates) == 0 {
		return
	}
	var names []string
	for _, gate := range q.pod.Spec.SchedulingGates {
		names = append(names, gate.Name)
	}
	gates := strings.Join(names, ", ")
	q.before(Reason{Cause: Gated, Text: "the pod has scheduling gates, and the scheduler does not look at it until they are removed: " + gates},
		Suggestion{Kind: RemoveGates, Text: "after the scheduling gates have been removed by what set them: " + gates})
}
