// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
	in := stuck.Input{Model: s.x.model, Pod: s.pod, Claims: s.own}
	if s.x.Events != nil {
		var err error
		if in.Events, err = s.x.Events(s.pod, s.own); err != nil {
			s.note("Events cannot be read: %v; without them it is unknown what the kubelet says.", err)
		}
	}
	s.Stuck = append(foreseen(s, s.own), stuck.Causes(in)...)
}

// foreseen finds what keeps containers from starting with the devices that they have, or would have.
func foreseen(s *sight, claims []*resourceapi.ResourceClaim) []stuck.Cause {
	var out []stuck.Cause
	for _, c := range claims {
		if slices.ContainsFunc(fleet.Results(c, s.x.model.Driver), fleet.IsMPS) && !ptr.Deref(s.pod.Spec.HostUsers, true) {
			out = append(out, stuck.Cause{
				Kind: stuck.UserNamespace, Text: "the pod has hostUsers: false, and containers with MPS shares do not start in a user namespace",
				Remedy: "leave hostUsers: false out, or ask for another class",
			})
			break
		}
	}
	for _, container := range slices.Concat(s.pod.Spec.InitContainers, s.pod.Spec.Containers) {
		shares, others := devicesOf(s, &container, claims)
		text := fmt.Sprintf("container %s would have %d MPS shares", container.Name, shares)
		if shares == 1 {
			text = fmt.Sprintf("container %s would have an MPS share and other devices", container.Name)
		}
		if shares > 0 && shares+others > 1 {
			out = append(out, stuck.Cause{
				Kind: stuck.SharesTogether, Text: text + ": a process can be a client of one share only",
				Remedy: "ask for one share of the sum, or for one share for each container",
			})
		}
	}
	return out
}

// devicesOf counts the MPS shares and the other devices that a container uses of claims.
func devicesOf(s *sight, container *corev1.Container, claims []*resourceapi.ResourceClaim) (shares, others int) {
	for _, use := range container.Resources.Claims {
		at := slices.IndexFunc(s.references, func(c allocation.PodClaim) bool { return c.Name == use.Name && c.Claim != nil })
		if at < 0 {
			continue
		}
		c := fleet.Named(claims, s.pod.Namespace, s.references[at].Claim.Name)
		if c == nil {
			continue
		}
		for _, r := range fleet.Results(c, s.x.model.Driver) {
			switch request, _, _ := strings.Cut(r.Request, "/"); {
			case use.Request != "" && use.Request != request || ptr.Deref(r.AdminAccess, false):
			case fleet.IsMPS(r):
				shares++
			default:
				others++
			}
		}
	}
	return shares, others
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
		if h.Result == r && h.Device != nil {
			a.Node, a.Profile, a.Placement = h.Device.GPU.Node.Name, h.Device.Profile, h.Device.Placement
		}
	}
	return a
}
