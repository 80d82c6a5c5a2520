// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// suggest is what a reason is helped with.
func suggest(kind SuggestionKind, format string, a ...any) Suggestion {
	return Suggestion{Kind: kind, Text: fmt.Sprintf(format, a...)}
}

// references finds what the pod refers to and what is not there.
func references(s *sight) {
	for i, c := range s.references {
		what, name, resource, cause, all := "claim template", c.Template, fleet.ResourceTemplates, TemplateMissing, names(s.x.model.Templates, s.pod.Namespace)
		if errors.Is(c.Err, allocation.ErrNoClaim) {
			what, resource, cause, all = "claim", fleet.ResourceClaims, ClaimMissing, names(s.x.model.Claims, s.pod.Namespace)
			name = ptr.Deref(s.pod.Spec.ResourceClaims[i].ResourceClaimName, name)
		}
		switch {
		case c.Err == nil:
		case !errors.Is(c.Err, allocation.ErrNoClaim) && !errors.Is(c.Err, allocation.ErrNoTemplate):
			s.because(Reason{Cause: ClaimNotOwned, Claim: c.Name}, "spec.resourceClaims %s: %v", c.Name, c.Err)
		case s.x.model.Lacks(resource, s.pod.Namespace):
			s.addUnseen("whether %s %s exists", what, name)
		default:
			r := Reason{Cause: cause, Claim: c.Name}
			if near := nearest(name, all); near != "" {
				r.help = append(r.help, suggest(ChangeReference, "refer to %s %s: did you mean that?", what, near))
			}
			r.help = append(r.help, suggest(CreateObject, "with a %s %s in namespace %s", what, name, s.pod.Namespace))
			s.because(r, "spec.resourceClaims %s refers to %s %s, which does not exist in namespace %s", c.Name, what, name, s.pod.Namespace)
		}
	}
}

// unclaiming notes which containers get no device of the pod's claims.
func unclaiming(s *sight) {
	var without []string
	for _, c := range s.pod.Spec.Containers {
		alone := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{c}}}
		if len(c.Resources.Claims) == 0 && len(allocation.Extended(alone)) == 0 {
			without = append(without, c.Name)
		}
	}
	if n := len(without); n > 0 && len(s.references) > 0 {
		s.note("%s %s no device: %s no claim in resources.claims.", plural(n, "Container ", "Containers ")+strings.Join(without, ", "),
			plural(n, "gets", "get"), plural(n, "it names", "they name"))
	}
}

// unusable finds claims that are there, and that no further pod can use.
func unusable(s *sight) {
	for _, c := range s.own {
		deleted(s, c)
		if n := len(c.Status.ReservedFor); n >= resourceapi.ResourceClaimReservedForMaxSize && !resourceclaim.IsReservedForPod(s.pod, c, true) {
			s.because(Reason{Cause: ClaimFull, Claim: c.Name},
				"claim %s is used by %d pods, which is the limit of Kubernetes: the pod waits until one of them ends; use a claim template to give each pod its own", c.Name, n)
		}
		unbound(s, c)
	}
}

// deleted says that a claim gets nothing any more: the scheduler does not look at its pods.
func deleted(s *sight, c *resourceapi.ResourceClaim) {
	if c.DeletionTimestamp == nil {
		return
	}
	users := ""
	if n := len(c.Status.ReservedFor); n > 0 {
		users = fmt.Sprintf(", as soon as the %d pods that use it have ended", n)
	}
	s.because(Reason{
		Cause: ClaimDeleted, Claim: c.Name, help: []Suggestion{suggest(CreateObject, "with a claim %s that is created after this one is gone", c.Name)},
	}, "claim %s is being deleted%s: no further pod can use it", c.Name, users)
}

// unbound says for which conditions of its devices the scheduler waits before it gives the pod a node.
func unbound(s *sight, c *resourceapi.ResourceClaim) {
	for _, r := range fleet.Results(c, "") {
		conditions := ptr.Deref(fleet.StatusOf(c, r), resourceapi.AllocatedDeviceStatus{}).Conditions
		missing := slices.DeleteFunc(slices.Clone(r.BindingConditions), func(name string) bool { return meta.IsStatusConditionTrue(conditions, name) })
		if len(missing) > 0 {
			s.because(Reason{Cause: NotBound, Claim: c.Name, Request: r.Request},
				"device %s of driver %s is allocated, and the scheduler waits until the driver has set %s in the claim's status: see the log of that driver",
				r.Device, r.Driver, strings.Join(missing, ", "))
		}
	}
}

// classes finds classes that are missing or cannot be used, and admin access that is not allowed.
func classes(ctx context.Context, s *sight) {
	for _, a := range asksOf(s.claims...) {
		of := Reason{Claim: a.claim.Name, Request: a.Name}
		switch class := s.x.planner.Cluster.Class(*a.Class); {
		case class == nil:
			of.Cause = ClassMissing
			noClass(ctx, s, a, of)
		case slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool { return s.CEL == nil }):
			// The allocator would panic.
			of.Cause = ExpressionError
			s.because(of, "a selector of DeviceClass %s has no CEL expression", class.Name)
		}
		if !a.Admin || s.x.AdminAllowed == nil {
			continue
		}
		if allowed, known := s.x.AdminAllowed(a.claim.Namespace); known && !allowed {
			const label = resourceapi.DRAAdminNamespaceLabelKey
			of.Cause, of.help = AdminForbidden, []Suggestion{
				suggest(LabelNamespace, "after an administrator's kubectl label namespace %s %s=true", a.claim.Namespace, label),
			}
			s.because(of, "request %s wants admin access, and namespace %s has no label %s=true: the API server refuses such claims",
				a.Name, a.claim.Namespace, label)
		}
	}
}

// noClass says that a class does not exist, and which may have been meant.
func noClass(ctx context.Context, s *sight, a ask, r Reason) {
	all := names(s.x.model.Classes, "")
	slices.Sort(all)
	instead, near := "", nearest(*a.Class, all)
	absent, help := s.x.absent()
	switch {
	case near != "":
		instead = fmt.Sprintf(": did you mean %s?", near)
		r.help = corrected(ctx, s, *a.Class, near)
	case absent != "" && isOurs(*a.Class):
		instead, r.help = ": "+absent, help
	case len(all) > 0:
		instead = "; there are " + strings.Join(all, ", ")
	}
	s.because(r, "DeviceClass %s does not exist%s", *a.Class, instead)
}

// corrected suggests another class wherever a class is asked for that does not exist, if everything could be allocated then.
func corrected(ctx context.Context, s *sight, class, other string) []Suggestion {
	limited, cancel := context.WithTimeout(ctx, s.x.budget)
	defer cancel()
	var claims []*resourceapi.ResourceClaim
	for _, c := range s.wanted(nil) {
		claims = append(claims, c.DeepCopy())
	}
	for _, b := range asksOf(claims...) {
		if *b.Class == class {
			*b.Class = other
		}
	}
	h := &helper{s: s, nodes: s.places(), empty: s.x.planner.Emptied()}
	help, fits := h.fits(limited, h.nodes, claims)
	if !fits {
		return nil
	}
	help.Kind, help.Text = ChangeClass, "with deviceClassName "+other+help.Text
	return []Suggestion{help}
}

// isOurs reports whether a class or an extended resource is named as those of the chart.
func isOurs(name string) bool {
	name, _, _ = strings.Cut(strings.TrimPrefix(name, resourceapi.ResourceDeviceClassPrefix), "/")
	return name == "nvidia.com" || strings.HasSuffix(name, ".nvidia.com") || strings.HasSuffix(name, ".partage.dev")
}

// remarks say what a claim gets that may not be what was meant.
func remarks(s *sight) {
	for _, a := range asksOf(s.claims...) {
		if memory, has := a.capacities()[fleet.CapacityMemory]; has && memory.Value() < 1<<20 {
			s.note("Request %s of claim %s asks for %s bytes of memory, which is rounded up to the smallest share: was a unit such as Gi meant?",
				a.Name, a.claim.Name, memory.String())
		}
	}
}

// withdrawn says how many of the matching devices the sharing policy has withdrawn.
func (t *tally) withdrawn(capable int) string {
	of := t.of(Withdrawn)
	return fmt.Sprintf("%d of %d matching devices %s withdrawn: %s",
		of.devices, capable, plural(of.devices, "is", "are"), of.text())
}

// otherKinds is what helps where all devices of a kind are withdrawn.
func otherKinds(ctx context.Context, s *sight) string {
	kinds := sets.New[string]()
	for _, d := range s.devicesOf(ctx, "") {
		if kind := kindsOffered[textOf(d.Device, "type")]; kind != "" && !slices.ContainsFunc(d.Device.Taints, isWithdrawn) {
			kinds.Insert(kind)
		}
	}
	if len(kinds) == 0 {
		return "when the administrator offers this kind of devices again: ask for it"
	}
	return fmt.Sprintf("with another kind of devices (there are %s), or ask the administrator", strings.Join(sets.List(kinds), ", "))
}

// absent says that no node publishes devices of the driver, if that is so, and what helps.
func (x *Explainer) absent() (text string, help []Suggestion) {
	if len(x.model.Nodes) > 0 || x.model.Lacks(fleet.ResourceSlices, "") {
		return "", nil
	}
	text = fmt.Sprintf("no node publishes devices of driver %s: Partage ", x.model.Driver)
	if slices.ContainsFunc(x.model.Pods, func(p *corev1.Pod) bool { return p.Labels[fleet.ComponentLabel] == fleet.PluginComponent }) {
		return text + "runs and has nothing to offer; kubectl gpu doctor may say why", nil
	}
	text += "does not run anywhere"
	if x.model.Hides(fleet.ResourcePods) {
		text += ", or has nothing to offer"
	}
	return text, []Suggestion{suggest(InstallDriver, "when Partage is installed, which is for an administrator, and runs on a node with a GPU")}
}

// notOffered says of a class for a kind of devices that the nodes which the pod may run on publish none of that kind, and what helps.
func notOffered(ctx context.Context, s *sight, name string) (string, []Suggestion) {
	text, help := s.x.absent()
	published := sets.New[string]()
	for _, d := range s.devicesOf(ctx, "") {
		published.Insert(textOf(d.Device, "type"))
	}
	for _, selector := range s.x.planner.Cluster.Class(name).Spec.Selectors {
		for _, c := range comparisons(selector, equality) {
			switch kind := kindsOffered[c.value]; {
			case c.name != "type" || kind == "" || published.Has(c.value):
			case text != "":
				return ": " + text, help
			default:
				return ": the administrator's sharing policy does not offer " + kind + " there, or the GPUs cannot have them", nil
			}
		}
	}
	return "", nil
}
