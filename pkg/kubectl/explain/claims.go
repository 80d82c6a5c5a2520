// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// references finds what the pod refers to and what is not there.
func references(s *sight) found {
	var f found
	for i, c := range s.references {
		what, name, resource, cause, all := "claim template", c.Template, fleet.ResourceTemplates, TemplateMissing, names(s.x.model.Templates, s.pod.Namespace)
		if errors.Is(c.Err, allocation.ErrNoClaim) {
			what, resource, cause, all = "claim", fleet.ResourceClaims, ClaimMissing, names(s.x.model.Claims, s.pod.Namespace)
			if of := s.pod.Spec.ResourceClaims[i].ResourceClaimName; of != nil {
				name = *of
			}
		} else if c.Err != nil && !errors.Is(c.Err, allocation.ErrNoTemplate) {
			f.reasons = append(f.reasons, Reason{Cause: ClaimNotOwned, Claim: c.Name, Text: fmt.Sprintf("spec.resourceClaims %s: %v", c.Name, c.Err)})
			continue
		}
		switch {
		case c.Err == nil:
		case s.hides(resource, s.pod.Namespace):
			f.unseen = append(f.unseen, fmt.Sprintf("whether %s %s exists", what, name))
		default:
			f.reasons = append(f.reasons, missing(cause, c.Name, what, name, s.pod.Namespace, all))
		}
	}
	return f
}

// missing says that a claim or template is not there, and which name may have been meant.
func missing(cause Cause, reference, what, name, namespace string, all []string) Reason {
	r := Reason{Cause: cause, Claim: reference, Text: fmt.Sprintf("spec.resourceClaims %s refers to %s %s, which does not exist in namespace %s", reference, what, name, namespace)}
	if near := nearest(name, all); near != "" {
		r.help = append(r.help, Suggestion{Kind: ChangeReference, Text: fmt.Sprintf("refer to %s %s: did you mean that?", what, near)})
	}
	r.help = append(r.help, Suggestion{Kind: CreateObject, Text: fmt.Sprintf("with a %s %s in namespace %s", what, name, namespace)})
	return r
}

// unusable finds claims that are there, and that no further pod can use.
func unusable(s *sight) found {
	var f found
	for _, c := range s.own {
		f.reasons = append(f.reasons, deleted(c)...)
		if n := len(c.Status.ReservedFor); n >= resourceapi.ResourceClaimReservedForMaxSize && !resourceclaim.IsReservedForPod(s.pod, c, true) {
			f.reasons = append(f.reasons, Reason{
				Cause: ClaimFull, Claim: c.Name,
				Text: fmt.Sprintf("claim %s is used by %d pods, which is the limit of Kubernetes: the pod waits until one of them ends; use a claim template to give each pod its own", c.Name, n),
			})
		}
		f.reasons = append(f.reasons, unbound(c)...)
	}
	return f
}

// deleted says that a claim gets nothing any more: the scheduler does not look at its pods.
func deleted(c *resourceapi.ResourceClaim) []Reason {
	if c.DeletionTimestamp == nil {
		return nil
	}
	text := fmt.Sprintf("claim %s is being deleted", c.Name)
	if n := len(c.Status.ReservedFor); n > 0 {
		text += fmt.Sprintf(", as soon as the %d pods that use it have ended", n)
	}
	return []Reason{{
		Cause: ClaimDeleted, Claim: c.Name, Text: text + ": no further pod can use it",
		help: []Suggestion{{Kind: CreateObject, Text: fmt.Sprintf("with a claim %s that is created after this one is gone", c.Name)}},
	}}
}

// unbound says for which conditions of its devices the scheduler waits before it gives the pod a node.
func unbound(c *resourceapi.ResourceClaim) []Reason {
	if c.Status.Allocation == nil {
		return nil
	}
	var out []Reason
	for i := range c.Status.Allocation.Devices.Results {
		r := &c.Status.Allocation.Devices.Results[i]
		var conditions []metav1.Condition
		for _, d := range c.Status.Devices {
			if d.Driver == r.Driver && d.Pool == r.Pool && d.Device == r.Device {
				conditions = d.Conditions
			}
		}
		missing := slices.DeleteFunc(slices.Clone(r.BindingConditions), func(name string) bool { return meta.IsStatusConditionTrue(conditions, name) })
		if len(missing) == 0 {
			continue
		}
		out = append(out, Reason{Cause: NotBound, Claim: c.Name, Request: r.Request, Text: fmt.Sprintf(
			"device %s of driver %s is allocated, and the scheduler waits until the driver has set %s in the claim's status: see the log of that driver",
			r.Device, r.Driver, strings.Join(missing, ", "))})
	}
	return out
}

// refusedClaims finds what the API server refuses in claims that it has not got yet.
func refusedClaims(s *sight) found {
	var f found
	for _, c := range s.claims {
		for _, text := range invalid(c) {
			f.reasons = append(f.reasons, Reason{Cause: ClaimInvalid, Claim: c.Name, Text: "the API server refuses such a claim: " + text})
		}
	}
	return f
}

// classes finds classes that are missing or cannot be used, and admin access that is not allowed.
func classes(ctx context.Context, s *sight) found {
	var f found
	for _, c := range s.claims {
		for _, a := range asksOf(c) {
			switch class := s.x.planner.Cluster.Class(*a.Class); {
			case class == nil:
				f.reasons = append(f.reasons, noClass(ctx, s, a))
			case slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool { return s.CEL == nil }):
				f.reasons = append(f.reasons, Reason{Cause: ExpressionError, Claim: c.Name, Request: a.Name, Text: fmt.Sprintf("a selector of DeviceClass %s has no CEL expression", class.Name)})
			}
			if !a.Admin || s.x.AdminAllowed == nil {
				continue
			}
			if allowed, known := s.x.AdminAllowed(c.Namespace); known && !allowed {
				f.reasons = append(f.reasons, Reason{
					Cause: AdminForbidden, Claim: c.Name, Request: a.Name,
					Text: fmt.Sprintf("request %s wants admin access, and namespace %s has no label %s=true: the API server refuses such claims", a.Name, c.Namespace, resourceapi.DRAAdminNamespaceLabelKey),
					help: []Suggestion{{Kind: LabelNamespace, Text: fmt.Sprintf("after an administrator's kubectl label namespace %s %s=true", c.Namespace, resourceapi.DRAAdminNamespaceLabelKey)}},
				})
			}
		}
	}
	return f
}

// noClass says that a class does not exist, and which may have been meant.
func noClass(ctx context.Context, s *sight, a ask) Reason {
	all := names(s.x.model.Classes, "")
	slices.Sort(all)
	r := Reason{Cause: ClassMissing, Claim: a.claim.Name, Request: a.Name, Text: fmt.Sprintf("DeviceClass %s does not exist", *a.Class)}
	near := nearest(*a.Class, all)
	switch {
	case near != "":
		r.Text += fmt.Sprintf(": did you mean %s?", near)
		other := a.changed(func(b ask) { *b.Class = near })
		if node, fits := try(ctx, s.x, s.x.planner, s.places(), []*resourceapi.ResourceClaim{other}); fits {
			r.help = []Suggestion{{Kind: ChangeClass, Node: node, Text: "with deviceClassName " + near}}
		}
	case len(all) > 0:
		r.Text += "; there are " + strings.Join(all, ", ")
	}
	return r
}

// remarks say what a claim gets that may not be what was meant.
func remarks(s *sight) found {
	var f found
	for _, c := range s.claims {
		for _, a := range asksOf(c) {
			if *a.Capacity == nil {
				continue
			}
			if memory, has := (*a.Capacity).Requests[fleet.CapacityMemory]; has && memory.Value() < 1<<20 {
				f.notes = append(f.notes, fmt.Sprintf("Request %s of claim %s asks for %s bytes of memory, which is rounded up to the smallest share: was a unit such as Gi meant?", a.Name, c.Name, memory.String()))
			}
		}
	}
	return f
}
