// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package explain says why a pod or a claim waits, why a pod is stuck, or what it got.
//
// The verdict is the scheduler's own allocator's. The reasons are found by predicates of this
// package that look at each device the way the allocator does, and tests hold the two against
// each other. What would help is tried with the allocator before it is said.
package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/doctor"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// Kind is that of the objects that explain prints.
const Kind = "Explanation"

// searchBudget is how long is looked for what would help, beyond the verdict.
const searchBudget = 10 * time.Second

// Explainer explains pods and claims of one Model.
type Explainer struct {
	planner *allocation.Planner
	model   *fleet.Model
	now     time.Time
	// budget is how long is looked for what would help, and tryFor how long one change is
	// searched for on one node: one after which the search is hard is no help.
	budget, tryFor time.Duration
	// waiting are those who wait, by what they ask for.
	waiting func() map[string]sets.Set[string]
	// file is the cluster with the pods of a file that come first, nil where there is one object.
	file *queue
	// AdminAllowed reports whether a namespace may use admin access, and whether that is known.
	// It may be nil.
	AdminAllowed func(namespace string) (allowed, known bool)
	// Events are those of the pod and its claims that are asked for. It may be nil.
	Events func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error)
	// NodeEvents are what the driver has said of a node. It may be nil.
	NodeEvents func(node string) ([]corev1.Event, error)
	// Failed are the events of a namespace, or of all, about pods that could not be created, and Owner is the object that
	// wants them. They may be nil.
	Failed func(namespace string) ([]corev1.Event, error)
	Owner  func(corev1.ObjectReference) (runtime.Object, error)
	// Volume reports whether a PersistentVolumeClaim is there and, in a word or two, why it may keep a pod waiting. It may be nil.
	Volume func(namespace, name string) (is bool, unseen string)
	// Quotas names those of a namespace. It may be nil.
	Quotas func(namespace string) ([]string, error)
	// Exists reports whether there is a ConfigMap or a Secret. It may be nil.
	Exists func(kind, namespace, name string) (bool, error)
	// Refused says why the API server would refuse an object, or why that is not known. It may be nil.
	Refused func(object *unstructured.Unstructured) (refused, unseen string)
}

// New returns an Explainer.
func New(m *fleet.Model, now time.Time) *Explainer {
	x := &Explainer{planner: allocation.New(m.Snapshot), model: m, now: now, budget: searchBudget, tryFor: tryFor}
	x.waiting = sync.OnceValue(x.count)
	return x
}

// begin starts to look at an object.
func (x *Explainer) begin(kind string, o metav1.Object) *sight {
	e := &Explanation{TypeMeta: printer.TypeMeta(Kind), Subject: Subject{kind, o.GetNamespace(), o.GetName()}, Assumptions: x.planner.Cluster.Assumptions}
	for _, m := range x.model.Missing {
		e.Notes = append(e.Notes, m.String())
	}
	s := &sight{Explanation: e, x: x}
	s.kinds = sync.OnceValue(func() [][]*corev1.Node { return x.planner.Kinds(s.nodes, s.wanted(nil)...) })
	return s
}

// because adds a reason. What does not fit as far as can be seen does not fit, whatever else there is.
func (e *Explanation) because(r Reason, format string, a ...any) {
	r.Text = fmt.Sprintf(format, a...)
	e.Reasons, e.Verdict, e.FitsOn = append(e.Reasons, r), Waits, nil
}

// addUnseen adds what was not looked at, and could contradict that it can be allocated.
func (e *Explanation) addUnseen(format string, a ...any) {
	e.Unseen = append(e.Unseen, fmt.Sprintf(format, a...))
}

func (e *Explanation) note(format string, a ...any) {
	e.Notes = append(e.Notes, fmt.Sprintf(format, a...))
}

// settle makes a verdict unknown that something could contradict which was not looked at, and puts the most informative reason first, and
// what helps with it. Other devices help only where nothing else is in the way. It may be called again, when there are more reasons.
func (e *Explanation) settle() *Explanation {
	if len(e.Unseen) > 0 && (e.Verdict == Allocatable || e.Verdict == "") {
		e.Verdict, e.FitsOn = Unknown, nil
	}
	sortReasons(e.Reasons)
	e.Suggestions = nil
	for i := range e.Reasons {
		for _, help := range e.Reasons[i].help {
			// Requests may have the same help.
			if !slices.ContainsFunc(e.Suggestions, func(s Suggestion) bool { return s.Text == help.Text }) {
				e.Suggestions = append(e.Suggestions, help)
			}
		}
	}
	if e.onlyDevices() {
		e.Suggestions = append(e.Suggestions, e.confirmed...)
	}
	return e
}

// Claim explains a claim.
func (x *Explainer) Claim(ctx context.Context, c *resourceapi.ResourceClaim) *Explanation {
	s := x.begin("ResourceClaim", c)
	s.own, s.nodes = []*resourceapi.ResourceClaim{c}, x.planner.Cluster.Nodes
	if c.Status.Allocation != nil {
		s.Verdict, s.Allocations = Allocated, allocations(s)
		return s.Explanation
	}
	if deleted(s, c); s.Verdict != Waits {
		allocate(ctx, s)
	}
	if s.settle(); s.Verdict == Allocatable {
		s.note("A claim is allocated when a pod that refers to it is scheduled.")
	}
	return s.Explanation
}

// noReasonGiven is said where nothing says more.
const noReasonGiven = "the pod's status does not say by whom, or by what"

// Pod explains a pod.
func (x *Explainer) Pod(ctx context.Context, pod *corev1.Pod) *Explanation {
	return x.pods(ctx, pod, &workload{replicas: 1})
}

// pods explains a pod of a workload.
func (x *Explainer) pods(ctx context.Context, pod *corev1.Pod, w *workload) *Explanation {
	s := x.begin("Pod", pod)
	if fleet.Ended(pod) {
		if s.Verdict = Finished; pod.Status.Phase == corev1.PodFailed {
			s.Reasons = []Reason{{Cause: PodFailed, Text: cmp.Or(stuck.Ended(pod), noReasonGiven)}}
		}
		return s.Explanation
	}
	s.read(pod)
	references(s)
	unclaiming(s)
	if !scheduled(pod) {
		unusable(s)
		unserved(s)
	}
	switch {
	case s.Verdict == Waits || len(s.Unseen) > 0:
		x.file.lose(pod)
	case len(s.own) == 0 && s.extended(nil) == nil && pod.Status.ExtendedResourceClaimStatus == nil:
		s.Verdict = NoDevices
	case scheduled(pod):
		started(s)
	default:
		s.place()
		if allocate(ctx, s) {
			outside(s, w)
			replicas(ctx, s, w)
		} else {
			x.file.lose(pod)
		}
		s.Allocations = allocations(s)
	}
	if s.Verdict != NoDevices && !scheduled(pod) {
		schedulerSays(s)
	}
	return s.settle()
}

// scheduled reports whether a pod has a node. In a file that is a wish.
func scheduled(pod *corev1.Pod) bool {
	return pod.Spec.NodeName != "" && (pod.Status.Phase != "" || pod.Status.StartTime != nil)
}

// allocate asks the allocator for what has no devices yet. It reports whether the allocator could be asked.
func allocate(ctx context.Context, s *sight) bool {
	if s.x.model.Lacks(fleet.ResourceSlices, "") || s.x.model.Lacks(fleet.ResourceClasses, "") {
		// The notes say which right is missing.
		s.Verdict = Unknown
		return false
	}
	hidden(s)
	for _, c := range s.own {
		if c.Status.Allocation == nil {
			s.claims = append(s.claims, complete(c))
		}
	}
	if invalid(s); s.Verdict != Waits {
		classes(ctx, s)
	}
	if s.Verdict == Waits {
		return false
	}
	decide(ctx, s)
	return true
}

// decide takes the allocator's answer, and says why it refuses, who is in the way, and what would help.
func decide(ctx context.Context, s *sight) {
	answers := s.search(ctx, s.x.planner, s.nodes)
	broken := slices.IndexFunc(answers, func(a allocation.Answer) bool {
		return a.Verdict == allocation.Failed || a.Verdict == allocation.TimedOut
	})
	for _, a := range answers {
		if broken < 0 && a.Verdict == allocation.Fits {
			if s.planned == nil && a.Results != nil {
				s.planned = allocation.Allocated(s.wanted(s.x.model.Node(a.Node)), a.Results)
			}
			s.FitsOn = append(s.FitsOn, a.Node)
		}
	}
	if len(s.FitsOn) > 0 {
		s.Verdict = Allocatable
		remarks(s)
		return
	}
	s.Verdict = Waits
	limited, cancel := context.WithTimeout(ctx, s.x.budget)
	defer cancel()
	h := newHelper(limited, s)
	if broken >= 0 {
		gaveUp(s, &answers[broken])
	} else {
		j := newJudge(s.x.planner)
		if refusals(ctx, s, j, h.empty); slices.ContainsFunc(s.Reasons, isTaken) {
			inTheWay(limited, s, j)
		}
	}
	h.suggest(limited)
	if limited.Err() != nil && ctx.Err() == nil {
		s.note("Looking for what would help was stopped after %s.", s.x.budget)
	}
}

// started explains a pod that has a node.
func started(s *sight) {
	s.Verdict, s.Allocations = Allocated, allocations(s)
	kubelets(s)
	in := stuck.Input{Model: s.x.model, Pod: s.pod, Claims: s.own}
	if s.x.Events != nil {
		var err error
		if in.Events, err = s.x.Events(s.pod, s.own); err != nil {
			s.note("Events cannot be read: %v; without them it is unknown what the kubelet and the driver say.", err)
		}
	}
	lostServer(s, in.Events)
	untainted(s)
	if !stuck.Waits(s.pod, s.x.now) {
		if s.pod.DeletionTimestamp != nil {
			s.Reasons = []Reason{{Cause: PodDeleted, Text: cmp.Or(stuck.Ended(s.pod), noReasonGiven)}}
		}
		return
	}
	causes := append(foreseen(s, nil), stuck.Causes(in)...)
	if causes[0].Kind == stuck.NothingSaid && stuck.Starting(s.pod, s.x.now) {
		s.Verdict = Starting
		return
	}
	s.Verdict, s.Stuck = IsStuck, causes
}

// allocations are what claims got.
func allocations(s *sight) []Allocation {
	var out []Allocation
	for _, c := range s.own {
		for _, r := range fleet.Results(c, "") {
			out = append(out, allocated(s, c, r))
		}
	}
	return out
}

func allocated(s *sight, c *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) Allocation {
	a := Allocation{Claim: c.Name, Request: r.Request, Driver: r.Driver, Device: r.Device, AdminAccess: ptr.Deref(r.AdminAccess, false)}
	a.Share = map[string]string{}
	for name, amount := range r.ConsumedCapacity {
		if !amount.IsZero() {
			a.Share[string(name)] = amount.String()
		}
	}
	status := ptr.Deref(fleet.StatusOf(c, r), resourceapi.AllocatedDeviceStatus{})
	a.Conditions, a.Data = status.Conditions, string(ptr.Deref(status.Data, runtime.RawExtension{}).Raw)
	for _, h := range s.x.model.Holdings {
		switch {
		case h.Result != r:
		case h.Device != nil:
			a.Node, a.Profile, a.Placement = h.Device.GPU.Node.Name, h.Device.Profile, h.Device.Placement
			a.Problems = s.taints(h)
		case s.x.model.Incomplete(r.Pool):
			s.note("Whether %s is published, and has taints, is unknown: not all ResourceSlices of pool %s are there.", r.Device, r.Pool)
		case !s.x.model.Lacks(fleet.ResourceSlices, ""):
			a.Problems = []string{"not published: no ResourceSlice has it"}
		}
	}
	return a
}

// taints says which taints a device has that a claim got, why, and what they mean for the pods that use it.
func (s *sight) taints(h *fleet.Holding) (texts []string) {
	for _, t := range h.Device.Taints {
		name, own := strings.CutPrefix(t.Key, s.x.model.Driver+"/")
		if own && device.Reason(name) == device.AdminAccess {
			continue
		}
		text := "tainted " + taintText(&t)
		if what, _, known := doctor.Meaning(name, t.Value); own && known {
			text += ": " + what
		} else if isWithdrawn(t) {
			text += ": " + withdrawnText(h.Device.Published, &t)
		}
		switch after, evicts := evicts(&t, h.Result.Tolerations); {
		case t.Effect == resourceapi.DeviceTaintEffectNone:
		case t.Effect != resourceapi.DeviceTaintEffectNoExecute:
			text += ". It keeps new claims away, and evicts no pod"
		case !evicts:
			text += ". The claim tolerates it"
		case h.Claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true":
			text += ". Kubernetes does not evict a pod that asks for an extended resource (kubernetes#141290)"
			for _, u := range h.Users() {
				text += ": " + fleet.DeleteCommand(u.Resource, u.Namespace, u.Name)
			}
		case after > 0:
			text += fmt.Sprintf(". The claim tolerates it for %d seconds. Then it evicts the pods that use the claim", after)
		default:
			text += ". It evicts the pods that use the claim"
		}
		texts = append(texts, text)
	}
	return texts
}

// evicts reports whether a taint evicts pods, and after how many seconds. Only tolerations of its very effect keep them, as in Kubernetes.
func evicts(t *resourceapi.DeviceTaint, tolerations []resourceapi.DeviceToleration) (after int64, evicts bool) {
	for _, o := range tolerations {
		switch seconds := max(ptr.Deref(o.TolerationSeconds, 0), 0); {
		case o.Effect != t.Effect || !resourceclaim.ToleratesTaint(o, *t):
		case o.TolerationSeconds == nil:
			return 0, false
		case !evicts || seconds < after:
			after, evicts = seconds, true
		}
	}
	return after, true
}
