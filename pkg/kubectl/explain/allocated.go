// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// started explains a pod that has a node.
func started(s *sight, e *Explanation) {
	e.Verdict, e.Allocations = Allocated, allocations(s)
	e.take(kubelets(s, nil))
	e.take(evicted(s))
	if !stuck.Waits(s.pod, s.x.now) {
		return
	}
	e.Verdict = IsStuck
	in := stuck.Input{
		Pod: s.pod, Claims: s.own, Pods: s.x.model.Pods, Driver: s.x.model.Driver, AllPods: !s.x.filter.Partial(),
		Node: s.x.model.Node(s.pod.Spec.NodeName),
	}
	if s.x.Events != nil {
		events, err := s.x.Events(s.pod, s.own)
		if err != nil {
			e.Notes = append(e.Notes, fmt.Sprintf("Events cannot be read: %v; without them it is unknown what the kubelet says.", err))
		}
		in.Events = events
	}
	e.Stuck = stuck.Causes(in)
}

// evicted notes that a pod which asks for extended resources stays on a device whose taint evicts the pods of other claims.
func evicted(s *sight) found {
	var f found
	status := s.pod.Status.ExtendedResourceClaimStatus
	for _, h := range s.x.model.Holdings {
		if status == nil || h.Claim.Namespace != s.pod.Namespace || h.Claim.Name != status.ResourceClaimName || h.Device == nil {
			continue
		}
		for _, t := range h.Device.Taints {
			if t.Effect == resourceapi.DeviceTaintEffectNoExecute {
				f.notes = append(f.notes, fmt.Sprintf("Device %s has the taint %s, which evicts pods that have a claim. Kubernetes does not evict a pod that asks for an extended resource "+
					"(kubernetes#141290): kubectl delete pod -n %s %s", h.Device.Name, taintText(&t), s.pod.Namespace, s.pod.Name))
			}
		}
	}
	return f
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
	for _, h := range s.x.model.Holdings {
		if h.Claim != c || h.Result != r {
			continue
		}
		if h.Device != nil {
			a.Node, a.Profile, a.Placement = h.Device.GPU.Node.Name, h.Device.Profile, h.Device.Placement
		}
		if h.Status != nil {
			a.Conditions = h.Status.Conditions
			if h.Status.Data != nil {
				a.Data = string(h.Status.Data.Raw)
			}
		}
	}
	return a
}
