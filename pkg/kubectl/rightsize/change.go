// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rightsize

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/pmezard/go-difflib/difflib"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
)

// Source is a claim, or the template that it was made from.
type Source struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Change is what would change in a manifest.
type Change struct {
	// Path is where.
	Path string `json:"path"`
	// Diff has the lines of the request, with "-" and "+" before those that go and come.
	Diff string `json:"diff"`
	// Notes are what to see to.
	Notes []string `json:"notes,omitempty"`
}

// podClaimName is the annotation of a claim that was made from a template.
const podClaimName = "resource.kubernetes.io/pod-claim-name"

// changeOf returns the change of the request that asked for a device, or nil if the claim has
// no such request.
func changeOf(m *fleet.Model, s *Size) *Change {
	h, enough := s.holding, *s.Enough
	before, claim := h.Ask(h.Claim), h.Claim.DeepCopy()
	if before == nil {
		return nil
	}
	devices := "spec.devices."
	if s.Source.Kind == kindTemplate {
		devices = "spec.spec.devices."
	}
	c := &Change{Path: devices + "requests", Notes: misfits(m, h, enough, devices)}
	if name, _, has := strings.Cut(h.Result.Request, "/"); has {
		c.Path += "[" + name + "].firstAvailable"
	}
	after := h.Ask(claim)
	if enough.Type != h.Device.Type {
		class := manifest.ClassOf(enough.Type)
		*after.Class = class
		if m.Class(class) == nil {
			c.Notes = append(c.Notes, fmt.Sprintf("no DeviceClass %s was seen: use one whose devices have the type %q", class, enough.Type))
		}
	}
	selectors := slices.DeleteFunc(*after.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && aboutSize.MatchString(s.CEL.Expression)
	})
	if enough.Profile != "" {
		selectors = append(selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
			Expression: manifest.Selector(m.Driver, "profile", enough.Profile),
		}})
	}
	if len(selectors) > 1 || len(selectors) == 1 && enough.Profile == "" {
		c.Notes = append(c.Notes, "see whether the other selectors match the smaller device")
	}
	*after.Selectors, *after.Capacity = selectors, nil
	if enough.Type == fleet.TypeMPS || enough.Type == fleet.TypeTimeSlice {
		requests := map[resourceapi.QualifiedName]resource.Quantity{fleet.CapacityMemory: *resource.NewQuantity(enough.MemoryBytes, resource.BinarySI)}
		if enough.SMPercent > 0 {
			requests[fleet.CapacitySMPercent] = *resource.NewQuantity(enough.SMPercent, resource.DecimalSI)
		}
		*after.Capacity = &resourceapi.CapacityRequirements{Requests: requests}
	}
	if n := *before.Count; n > 1 {
		c.Notes = append(c.Notes, fmt.Sprintf("the request is for %d devices: all of them change", n))
	}
	c.Diff = diff(lines(before), lines(after))
	return c
}

// misfits says which configurations of the claim would be refused with the smaller device.
func misfits(m *fleet.Model, h *fleet.Holding, enough Part, devices string) (notes []string) {
	request, _, _ := strings.Cut(h.Result.Request, "/")
	for i, c := range h.Claim.Spec.Devices.Config {
		named := slices.ContainsFunc(c.Requests, func(name string) bool { return name == request || name == h.Result.Request })
		if c.Opaque == nil || c.Opaque.Driver != m.Driver || len(c.Requests) > 0 && !named {
			continue
		}
		value, err := api.Decode(c.Opaque.Parameters)
		if err != nil {
			// The driver has prepared no claim with it.
			continue
		}
		takes := "a " + api.MigDeviceConfigKind
		_, ofPartitions := value.(*api.MigDeviceConfig)
		fits := ofPartitions == (enough.Profile != "")
		if enough.Type != fleet.TypeMIG {
			takes = "no configuration but a defaultClientPriority"
			fits = fits && value.MPS() != nil && value.MPS().OnlyClientPriority()
		}
		if !fits {
			notes = append(notes, fmt.Sprintf("change %sconfig[%d], too: the smaller device of request %s takes %s", devices, i, request, takes))
		}
	}
	return notes
}

const kindTemplate = "ResourceClaimTemplate"

// sourceOf returns what a claim was made from, and why nobody can edit that, or "".
func sourceOf(h *fleet.Holding) (s Source, unchangeable string) {
	s = Source{"ResourceClaim", h.Claim.Namespace, h.Claim.Name}
	switch template := templateOf(h); {
	case h.Claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true":
		if len(h.Pods) > 0 {
			kind, name := fleet.OwnerOf(h.Pods[0])
			s.Kind, s.Name = cmp.Or(kind, "Pod"), cmp.Or(name, h.Pods[0].Name)
		}
		return s, "the scheduler made the claim for an extended resource: give the pod a claim instead, which kubectl gpu migrate pods writes"
	case template != "":
		s.Kind, s.Name = kindTemplate, template
	case h.Claim.Annotations[podClaimName] != "":
		return s, "the claim was made from a template, and which one is unknown, because its pod cannot be read"
	}
	return s, ""
}

// aboutSize are selectors that choose a size.
var aboutSize = regexp.MustCompile(`\bprofile\b|\.capacity\[|\bmemory\b|multiprocessors`)

// templateOf returns the template that a claim was made from, if its pod could be read.
func templateOf(h *fleet.Holding) string {
	name, owner := h.Claim.Annotations[podClaimName], metav1.GetControllerOf(h.Claim)
	if name == "" || owner == nil {
		return ""
	}
	for _, p := range h.Pods {
		if p.UID != owner.UID {
			continue
		}
		i := slices.IndexFunc(p.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == name })
		if i >= 0 && p.Spec.ResourceClaims[i].ResourceClaimTemplateName != nil {
			return *p.Spec.ResourceClaims[i].ResourceClaimTemplateName
		}
	}
	return ""
}

// lines writes a request, or an alternative of one, as it is in a manifest.
func lines(a *fleet.Ask) []string {
	data, err := yaml.Marshal([]any{a.Object})
	if err != nil {
		// A type of the API can be written.
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
}

// diff returns the lines of both, in order.
func diff(before, after []string) string {
	var out strings.Builder
	write := func(mark string, lines []string) {
		for _, line := range lines {
			out.WriteString(mark + line + "\n")
		}
	}
	for _, op := range difflib.NewMatcher(before, after).GetOpCodes() {
		if op.Tag == 'e' {
			write("  ", before[op.I1:op.I2])
			continue
		}
		write("- ", before[op.I1:op.I2])
		write("+ ", after[op.J1:op.J2])
	}
	return out.String()
}
