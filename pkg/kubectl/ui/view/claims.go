// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

func claimKey(c *resourceapi.ResourceClaim) string { return "claim/" + c.Namespace + "/" + c.Name }

// PodKey returns the key of a pod.
func PodKey(p *corev1.Pod) string { return "pod/" + p.Namespace + "/" + p.Name }

// claimsOf returns the claims that have devices of the driver, and those that wait and ask for
// classes of it, by key.
func claimsOf(m *fleet.Model, u usages) map[string]*Claim {
	claims := map[string]*Claim{}
	for _, c := range m.Claims {
		if c.Status.Allocation == nil && concerns(m, &c.Spec.Devices) {
			claims[claimKey(c)] = newClaim(c)
		}
	}
	for _, h := range m.Holdings {
		key := claimKey(h.Claim)
		c := claims[key]
		if c == nil {
			c = newClaim(h.Claim)
			claims[key] = c
			users(c, h)
		}
		c.Devices = append(c.Devices, heldOf(h, u))
	}
	return claims
}

func newClaim(c *resourceapi.ResourceClaim) *Claim {
	out := &Claim{Namespace: c.Namespace, Name: c.Name, Whose: c.Name, Created: c.CreationTimestamp, Requests: requestsOf(&c.Spec.Devices)}
	switch {
	case c.DeletionTimestamp != nil:
		out.State = "ending"
	case c.Status.Allocation == nil:
		out.State = "waiting"
	case len(c.Status.ReservedFor) > 0:
		out.State = "in use"
	default:
		out.State = "allocated"
	}
	return out
}

// whose is what people know of a claim: the names of most are made up. It is what its pods belong to or, where that is not one thing, its
// pod, and otherwise its name.
func whose(name string, pods []*corev1.Pod) string {
	owners := map[string]bool{}
	for _, p := range pods {
		_, owner := fleet.OwnerOf(p)
		owners[cmp.Or(owner, p.Name)] = true
	}
	if len(owners) != 1 {
		return name
	}
	return slices.Collect(maps.Keys(owners))[0]
}

func users(c *Claim, h *fleet.Holding) {
	c.Whose = whose(c.Name, h.Pods)
	for _, u := range h.Users() {
		if u.Pod != nil {
			c.Pods = append(c.Pods, PodKey(u.Pod))
		} else {
			c.Others = append(c.Others, u.Resource+" "+u.Name)
		}
	}
}

func heldOf(h *fleet.Holding, u usages) Held {
	out := Held{Device: h.Result.Device, Amount: amountOf(h.Result), Usage: u.of(h), Gone: h.Device == nil, Node: h.Result.Pool}
	if d := h.Device; d != nil {
		out.Node, out.GPU, out.Type, out.Profile, out.UUID = d.GPU.Node.Name, d.GPU.Name, d.Type, d.Profile, d.UUID
		if out.Memory == 0 && !d.Shared() {
			out.Memory = d.Capacity(fleet.CapacityMemory)
		}
	}
	if not := h.NotReady(); not != nil {
		out.NotReady = &Badge{Text: not.Reason, Title: not.Message, Bad: true}
	}
	return out
}

func requestsOf(spec *resourceapi.DeviceClaim) []Request {
	var requests []Request
	for _, a := range fleet.AsksOf(spec) {
		requests = append(requests, Request{Name: a.Name, Text: textOf(a), Selectors: expressions(*a.Selectors)})
	}
	return requests
}

func textOf(a fleet.Ask) string {
	text := fmt.Sprintf("%d × %s", max(1, *a.Count), *a.Class)
	if *a.Mode == resourceapi.DeviceAllocationModeAll {
		text = "all of " + *a.Class
	}
	if *a.Capacity == nil {
		return text
	}
	var amounts []string
	for name, q := range (*a.Capacity).Requests {
		amounts = append(amounts, fmt.Sprintf("%s %s", name, q.String()))
	}
	slices.Sort(amounts)
	return text + " with " + strings.Join(amounts, ", ")
}

func expressions(selectors []resourceapi.DeviceSelector) []string {
	var all []string
	for _, s := range selectors {
		if s.CEL != nil {
			all = append(all, s.CEL.Expression)
		}
	}
	return all
}

// concerns reports whether a request may be for devices of the driver: its class names the
// driver, or names none, or cannot be read.
func concerns(m *fleet.Model, spec *resourceapi.DeviceClaim) bool {
	return slices.ContainsFunc(fleet.AsksOf(spec), func(a fleet.Ask) bool { return ofDriver(m, *a.Class) })
}

func ofDriver(m *fleet.Model, class string) bool {
	c := m.Class(class)
	if c == nil {
		return true
	}
	named := false
	for _, e := range expressions(c.Spec.Selectors) {
		if strings.Contains(e, m.Driver) {
			return true
		}
		named = named || strings.Contains(e, "device.driver")
	}
	return !named
}

// Waits reports whether the scheduler has found no node for a pod that wants devices of the
// model's driver.
func Waits(m *fleet.Model, p *corev1.Pod) bool {
	if p.Spec.NodeName != "" || p.Status.Phase != corev1.PodPending && p.Status.Phase != "" || p.DeletionTimestamp != nil {
		return false
	}
	return wants(m, p, false) || wantsExtended(m, p)
}

// Stuck reports whether a pod that wants devices of the model's driver has a node, and containers
// that do not start.
func Stuck(m *fleet.Model, p *corev1.Pod) bool {
	if !stuck.Waits(p, time.Now()) {
		return false
	}
	var extended *resourceapi.ResourceClaim
	if e := p.Status.ExtendedResourceClaimStatus; e != nil {
		extended = m.Claim(p.Namespace, e.ResourceClaimName)
	}
	return wants(m, p, true) || extended != nil && len(fleet.Results(extended, m.Driver)) > 0
}

// wants reports whether a claim of a pod has devices of the driver or wants some. Of one that cannot be found nobody knows what it would want:
// where the pod has no node yet, it is what keeps the pod waiting.
func wants(m *fleet.Model, p *corev1.Pod, started bool) bool {
	return slices.ContainsFunc(allocation.ClaimsOf(m.Snapshot, p), func(c allocation.PodClaim) bool {
		if c.Claim == nil {
			return c.Err != nil && !started
		}
		return c.Claim.Status.Allocation == nil && concerns(m, &c.Claim.Spec.Devices) && (!c.New || !started) ||
			len(fleet.Results(c.Claim, m.Driver)) > 0
	})
}

// wantsExtended reports whether a container has a request such as nvidia.com/gpu for which the
// driver has a class.
func wantsExtended(m *fleet.Model, p *corev1.Pod) bool {
	requested := allocation.PodRequests(p)
	return slices.ContainsFunc(m.Classes, func(c *resourceapi.DeviceClass) bool {
		_, has := requested[corev1.ResourceName(resourceapi.ResourceDeviceClassPrefix+c.Name)]
		_, named := requested[corev1.ResourceName(ptr.Deref(c.Spec.ExtendedResourceName, ""))]
		return (has || named) && ofDriver(m, c.Name)
	})
}

// podsOf returns the pods that use claims, wait for some or are stuck, by key, and has claims name the pods that wait for them.
func podsOf(m *fleet.Model, claims map[string]*Claim) map[string]*Pod {
	pods, using := map[string]*Pod{}, sets.New[*corev1.Pod]()
	for _, h := range m.Holdings {
		using.Insert(h.Pods...)
	}
	for _, p := range m.Pods {
		isStuck, waits := Stuck(m, p), Waits(m, p)
		if !isStuck && !waits && !using.Has(p) {
			continue
		}
		key, pod := PodKey(p), newPod(m, p, claims)
		pod.Stuck, pod.Waiting, pods[key] = isStuck, waits, pod
		pod.starting = stuck.Starting(p, time.Now())
		for _, of := range pod.Claims {
			if c := claims[of]; waits && !slices.Contains(c.Pods, key) {
				c.Pods = append(c.Pods, key)
				slices.Sort(c.Pods)
			}
		}
	}
	return pods
}

func newPod(m *fleet.Model, p *corev1.Pod, claims map[string]*Claim) *Pod {
	out := &Pod{
		Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName, Phase: phaseOf(p), Created: p.CreationTimestamp, Owner: fleet.User{Pod: p}.Owner(),
	}
	add := func(name string) {
		if key := "claim/" + p.Namespace + "/" + name; claims[key] != nil && !slices.Contains(out.Claims, key) {
			out.Claims = append(out.Claims, key)
		}
	}
	for _, c := range allocation.ClaimsOf(m.Snapshot, p) {
		if c.Claim != nil && !c.New {
			add(c.Claim.Name)
		}
	}
	if e := p.Status.ExtendedResourceClaimStatus; e != nil {
		add(e.ResourceClaimName)
	}
	if c := fleet.Condition(p, corev1.PodScheduled); c.Status != corev1.ConditionTrue {
		out.Scheduler = c.Message
	}
	return out
}

// phaseOf says in which state a pod is, as kubectl get does for the most frequent ones.
func phaseOf(p *corev1.Pod) string {
	if p.DeletionTimestamp != nil {
		return "Terminating"
	}
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Waiting != nil && s.State.Waiting.Reason != "" {
			return s.State.Waiting.Reason
		}
	}
	return cmp.Or(p.Status.Reason, string(p.Status.Phase), string(corev1.PodPending))
}
