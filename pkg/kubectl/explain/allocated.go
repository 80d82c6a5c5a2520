// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// scheduled explains a pod that has a node.
func (q *inquiry) scheduled(claims []*resourceapi.ResourceClaim) {
	q.Verdict = Allocated
	for _, c := range claims {
		q.describe(c)
	}
	q.kubelets()
	if !stuck.Waits(q.pod, q.now) {
		return
	}
	q.Verdict = IsStuck
	in := stuck.Input{Pod: q.pod, Claims: claims, Pods: q.model.Pods, Driver: q.model.Driver, AllPods: !q.filter.Partial()}
	for _, n := range q.model.Snapshot.Nodes {
		if n.Name == q.pod.Spec.NodeName {
			in.Node = n
		}
	}
	if q.Events != nil {
		events, err := q.Events(q.pod, claims)
		if err != nil {
			q.Notes = append(q.Notes, fmt.Sprintf("Events cannot be read: %v; without them it is unknown what the kubelet says.", err))
		}
		in.Events = events
	}
	q.Stuck = stuck.Causes(in)
}

// describe adds what a claim got.
func (q *inquiry) describe(c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
	for i := range c.Status.Allocation.Devices.Results {
		r := &c.Status.Allocation.Devices.Results[i]
		a := Allocation{Claim: c.Name, Request: r.Request, Driver: r.Driver, Device: r.Device, AdminAccess: ptr.Deref(r.AdminAccess, false)}
		if len(r.ConsumedCapacity) > 0 {
			a.Share = map[string]string{}
			for name, amount := range r.ConsumedCapacity {
				if amount.IsZero() {
					continue
				}
				a.Share[string(name)] = amount.String()
			}
		}
		for _, h := range q.model.Holdings {
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
		q.Allocations = append(q.Allocations, a)
	}
}
