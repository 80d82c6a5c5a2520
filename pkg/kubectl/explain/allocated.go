// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// started explains a pod that has a node.
func started(s *sight) {
	s.Verdict, s.Allocations = Allocated, allocations(s)
	kubelets(s)
	evicted(s)
	if !stuck.Waits(s.pod, s.x.now) {
		return
	}
	s.Verdict = IsStuck
	in := stuck.Input{
		Pod: s.pod, Claims: s.own, Pods: s.x.model.Pods, Driver: s.x.model.Driver, AllPods: !s.x.model.Hides(fleet.ResourcePods),
		Node: s.x.model.Node(s.pod.Spec.NodeName),
	}
	if s.x.Events != nil {
		var err error
		if in.Events, err = s.x.Events(s.pod, s.own); err != nil {
			s.note("Events cannot be read: %v; without them it is unknown what the kubelet says.", err)
		}
	}
	s.Stuck = stuck.Causes(in)
}

// evicted notes that a pod which asks for extended resources stays on a device whose taint evicts the pods of other claims.
func evicted(s *sight) {
	status := s.pod.Status.ExtendedResourceClaimStatus
	for _, h := range s.x.model.Holdings {
		if status == nil || h.Claim.Namespace != s.pod.Namespace || h.Claim.Name != status.ResourceClaimName || h.Device == nil {
			continue
		}
		for _, t := range h.Device.Taints {
			if t.Effect == resourceapi.DeviceTaintEffectNoExecute {
				s.note("Device %s has the taint %s, which evicts pods that have a claim. Kubernetes does not evict a pod that asks for an extended resource "+
					"(kubernetes#141290): kubectl delete pod -n %s %s", h.Device.Name, taintText(&t), s.pod.Namespace, s.pod.Name)
			}
		}
	}
}

// allocations are what claims got.
func allocations(s *sight) []Allocation {
	var out []Allocation
	for _, c := range s.own {
		if c.Status.Allocation == nil {
			continue
		}
		for i := range c.Status.Allocation.Devices.Results {
			out = append(out, allocated(s, c, &c.Status.Allocation.Devices.Results[i]))
		}
	}
	return out
}

func allocated(s *sight, c *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) Allocation {
	a := Allocation{Claim: c.Name, Request: r.Request, Driver: r.Driver, Device: r.Device, AdminAccess: ptr.Deref(r.AdminAccess, false)}
	if len(r.ConsumedCapacity) > 0 {
		a.Share = map[string]string{}
		for name, amount := range r.ConsumedCapacity {
			if !amount.IsZero() {
				a.Share[string(name)] = amount.String()
			}
		}
	}
	if status := fleet.StatusOf(c, r); status != nil {
		a.Conditions = status.Conditions
		if status.Data != nil {
			a.Data = string(status.Data.Raw)
		}
	}
	for _, h := range s.x.model.Holdings {
		if h.Result == r && h.Device != nil {
			a.Node, a.Profile, a.Placement = h.Device.GPU.Node.Name, h.Device.Profile, h.Device.Placement
		}
	}
	return a
}

// most is how many nodes are looked at for claims that could end.
const most = 16

// inTheWay finds the claims that have what the requests could use.
func inTheWay(ctx context.Context, s *sight, j *judge) {
	nodes, left := 0, 0
	for _, n := range slices.SortedFunc(slices.Values(s.nodes), func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) }) {
		if nodes == most {
			left++
		} else if on := holdersOn(ctx, s, j, n); len(on) > 0 {
			s.InTheWay = append(s.InTheWay, on...)
			nodes++
		}
	}
	if left > 0 {
		s.note("Who is in the way was not looked for on %d more nodes.", left)
	}
}

func holdersOn(ctx context.Context, s *sight, j *judge, n *corev1.Node) []Holder {
	byClaim := map[*resourceapi.ResourceClaim]sets.Set[string]{}
	add := func(p *allocation.Pool, device string) {
		for _, h := range j.planner.Held(p, device) {
			// The pod cannot wait for the end of what it needs itself.
			if slices.Contains(s.own, h.Claim) {
				continue
			}
			if byClaim[h.Claim] == nil {
				byClaim[h.Claim] = sets.New[string]()
			}
			byClaim[h.Claim].Insert(device)
		}
	}
	for _, c := range s.wanted(nil) {
		for _, a := range asksOf(c) {
			for _, f := range j.onNode(ctx, n, a) {
				if cause := f.cause(); cause == Held || cause == CapacityUsed {
					add(f.Pool, f.Device.Name)
				}
				if slices.Contains(f.causes, CountersUsed) {
					for _, name := range neighbours(f.Pool, f.Device) {
						add(f.Pool, name)
					}
				}
			}
		}
	}
	var out []Holder
	for c, devices := range byClaim {
		out = append(out, holder(c, n.Name, sets.List(devices), s.x.now))
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(len(a.Pods), len(b.Pods)), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Claim, b.Claim))
	})
	return out
}

// holder says what a claim has, for people and programs.
func holder(c *resourceapi.ResourceClaim, node string, devices []string, now time.Time) Holder {
	h := Holder{Namespace: c.Namespace, Claim: c.Name, Node: node, Devices: devices, claim: c}
	for _, r := range c.Status.ReservedFor {
		h.Pods = append(h.Pods, r.Name)
	}
	if since := fleet.AllocatedAt(c); !since.IsZero() {
		h.Since, h.For = &since, &metav1.Duration{Duration: now.Sub(since.Time)}
	}
	return h
}

// neighbours returns the devices that need the same counters as one.
func neighbours(p *allocation.Pool, d *resourceapi.Device) []string {
	var out []string
	for _, s := range p.Slices {
		for i := range s.Spec.Devices {
			other := &s.Spec.Devices[i]
			if other.Name != d.Name && overlap(d, other) {
				out = append(out, other.Name)
			}
		}
	}
	return out
}

func overlap(a, b *resourceapi.Device) bool {
	for _, x := range a.ConsumesCounters {
		for _, y := range b.ConsumesCounters {
			if x.CounterSet != y.CounterSet {
				continue
			}
			for name, c := range x.Counters {
				if o, has := y.Counters[name]; has && !c.Value.IsZero() && !o.Value.IsZero() {
					return true
				}
			}
		}
	}
	return false
}
