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

// podClaims returns the claims of the pod, and gives reasons where one is missing.
func (q *inquiry) podClaims() []*resourceapi.ResourceClaim {
	var claims []*resourceapi.ResourceClaim
	for _, c := range allocation.ClaimsOf(q.model.Snapshot, q.pod) {
		switch {
		case errors.Is(c.Err, allocation.ErrNoTemplate) && q.unreadable(fleet.ResourceTemplates, q.pod.Namespace),
			errors.Is(c.Err, allocation.ErrNoClaim) && q.unreadable(fleet.ResourceClaims, q.pod.Namespace):
			q.Verdict = Unknown
		case errors.Is(c.Err, allocation.ErrNoTemplate):
			q.missing(TemplateMissing, c, "claim template", q.templateNames())
		case errors.Is(c.Err, allocation.ErrNoClaim):
			q.missing(ClaimMissing, c, "claim", q.claimNames())
		case c.Err != nil:
			q.Reasons = append(q.Reasons, Reason{Cause: ClaimNotOwned, Claim: c.Name, Text: fmt.Sprintf("spec.resourceClaims %s: %v", c.Name, c.Err)})
		case c.Claim != nil:
			claims = append(claims, c.Claim)
		}
	}
	if s := q.pod.Status.ExtendedResourceClaimStatus; s != nil {
		for _, c := range q.model.Claims {
			if c.Namespace == q.pod.Namespace && c.Name == s.ResourceClaimName {
				claims = append(claims, c)
			}
		}
	}
	if scheduled(q.pod) {
		return claims
	}
	for _, c := range claims {
		q.deleted(c)
		q.reserved(c)
		q.bound(c)
	}
	return claims
}

// missing says that a claim or template is not there, and which name may have been meant.
func (q *inquiry) missing(cause Cause, c allocation.PodClaim, what string, names []string) {
	name := c.Template
	for _, ref := range q.pod.Spec.ResourceClaims {
		if ref.Name == c.Name && ref.ResourceClaimName != nil {
			name = *ref.ResourceClaimName
		}
	}
	q.Reasons = append(q.Reasons, Reason{Cause: cause, Claim: c.Name, Text: fmt.Sprintf("spec.resourceClaims %s refers to %s %s, which does not exist in namespace %s", c.Name, what, name, q.pod.Namespace)})
	if near := nearest(name, names); near != "" {
		q.Suggestions = append(q.Suggestions, Suggestion{Kind: ChangeReference, Text: fmt.Sprintf("refer to %s %s: did you mean that?", what, near)})
	}
	q.Suggestions = append(q.Suggestions, Suggestion{Kind: CreateObject, Text: fmt.Sprintf("with a %s %s in namespace %s", what, name, q.pod.Namespace)})
}

func (q *inquiry) templateNames() []string {
	var names []string
	for _, t := range q.model.Templates {
		if t.Namespace == q.pod.Namespace {
			names = append(names, t.Name)
		}
	}
	return names
}

func (q *inquiry) claimNames() []string {
	var names []string
	for _, c := range q.model.Claims {
		if c.Namespace == q.pod.Namespace {
			names = append(names, c.Name)
		}
	}
	return names
}

// deleted says that a claim gets nothing any more: the scheduler does not look at its pods.
func (q *inquiry) deleted(c *resourceapi.ResourceClaim) {
	if c.DeletionTimestamp == nil {
		return
	}
	text := fmt.Sprintf("claim %s is being deleted", c.Name)
	if n := len(c.Status.ReservedFor); n > 0 {
		text += fmt.Sprintf(", as soon as the %d pods that use it have ended", n)
	}
	q.Reasons = append(q.Reasons, Reason{Cause: ClaimDeleted, Claim: c.Name, Text: text + ": no further pod can use it"})
	q.Suggestions = append(q.Suggestions, Suggestion{Kind: CreateObject, Text: fmt.Sprintf("with a claim %s that is created after this one is gone", c.Name)})
}

// bound says for which conditions of its devices the scheduler waits before it gives the pod a node.
func (q *inquiry) bound(c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
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
		q.Reasons = append(q.Reasons, Reason{Cause: NotBound, Claim: c.Name, Request: r.Request, Text: fmt.Sprintf(
			"device %s of driver %s is allocated, and the scheduler waits until the driver has set %s in the claim's status: see the log of that driver",
			r.Device, r.Driver, strings.Join(missing, ", "))})
	}
}

// reserved says that no further pod can use a claim.
func (q *inquiry) reserved(c *resourceapi.ResourceClaim) {
	if len(c.Status.ReservedFor) < resourceapi.ResourceClaimReservedForMaxSize || resourceclaim.IsReservedForPod(q.pod, c, true) {
		return
	}
	q.Reasons = append(q.Reasons, Reason{
		Cause: ClaimFull, Claim: c.Name,
		Text: fmt.Sprintf("claim %s is used by %d pods, which is the limit of Kubernetes: the pod waits until one of them ends; use a claim template to give each pod its own", c.Name, len(c.Status.ReservedFor)),
	})
}

// check looks at a claim by itself, and takes it among those to be allocated.
func (q *inquiry) check(ctx context.Context, c *resourceapi.ResourceClaim) bool {
	before := len(q.Reasons)
	for _, text := range invalid(c) {
		q.Reasons = append(q.Reasons, Reason{Cause: ClaimInvalid, Claim: c.Name, Text: "the API server refuses such a claim: " + text})
	}
	if len(q.Reasons) > before {
		q.Verdict = Waits
		return false
	}
	for _, a := range asksOf(c) {
		switch class := q.planner.Class(*a.class); {
		case class == nil:
			q.noClass(ctx, a)
		case slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool { return s.CEL == nil }):
			q.Reasons = append(q.Reasons, Reason{Cause: ExpressionError, Claim: c.Name, Request: a.name, Text: fmt.Sprintf("a selector of DeviceClass %s has no CEL expression", class.Name)})
		}
		if a.admin && q.AdminAllowed != nil {
			if allowed, known := q.AdminAllowed(c.Namespace); known && !allowed {
				q.Reasons = append(q.Reasons, Reason{
					Cause: AdminForbidden, Claim: c.Name, Request: a.name,
					Text: fmt.Sprintf("request %s wants admin access, and namespace %s has no label %s=true: the API server refuses such claims", a.name, c.Namespace, resourceapi.DRAAdminNamespaceLabelKey),
				})
				q.Suggestions = append(q.Suggestions, Suggestion{
					Kind: LabelNamespace, Text: fmt.Sprintf("after an administrator's kubectl label namespace %s %s=true", c.Namespace, resourceapi.DRAAdminNamespaceLabelKey),
				})
			}
		}
	}
	q.claims = append(q.claims, c)
	if len(q.Reasons) > before {
		q.Verdict = Waits
		return false
	}
	return true
}

// noClass says that a class does not exist, and which may have been meant.
func (q *inquiry) noClass(ctx context.Context, a ask) {
	var names []string
	for _, c := range q.model.Classes {
		names = append(names, c.Name)
	}
	slices.Sort(names)
	text := fmt.Sprintf("DeviceClass %s does not exist", *a.class)
	near := nearest(*a.class, names)
	switch {
	case near != "":
		text += fmt.Sprintf(": did you mean %s?", near)
	case len(names) > 0:
		text += "; there are " + strings.Join(names, ", ")
	}
	q.Reasons = append(q.Reasons, Reason{Cause: ClassMissing, Claim: a.claim.Name, Request: a.name, Text: text})
	if near == "" {
		return
	}
	other := a.changed(func(b ask) { *b.class = near })
	if node, fits := q.try(ctx, q.planner, q.places(), []*resourceapi.ResourceClaim{other}); fits {
		q.Suggestions = append(q.Suggestions, Suggestion{Kind: ChangeClass, Node: node, Text: "with deviceClassName " + near})
	}
}
