// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

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
