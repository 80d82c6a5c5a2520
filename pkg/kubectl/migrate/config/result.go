// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package config translates configurations of other programs that share GPUs: into a
// SharingPolicy, device classes and claim templates.
package config

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
)

// Names of extended resources.
const (
	domain         = "nvidia.com/"
	resourceGPU    = domain + "gpu"
	migPrefix      = domain + "mig-"
	sharedSuffix   = ".shared"
	extraClass     = ".extended.partage.dev"
	classOfProfile = "mig-%s.nvidia.com"
)

// Result is what a configuration becomes.
type Result struct {
	Policy   Policy
	Findings finding.List
	driver   string
	// resources are the devices that pods got by the name of an extended resource.
	resources map[string][]target
}

// target is a kind of device that claims ask for: of a profile, or of whole GPUs.
type target struct {
	kind    policy.Kind
	profile string
}

func newResult(driver string) *Result {
	return &Result{
		Policy: Policy{APIVersion: policy.Version, Kind: policy.PolicyKind}, driver: driver, resources: map[string][]target{},
	}
}

// serve notes that pods which ask for a resource get a kind of device.
func (r *Result) serve(resource string, t target) {
	if !slices.Contains(r.resources[resource], t) {
		r.resources[resource] = append(r.resources[resource], t)
	}
}

// targets returns all kinds of devices, sorted.
func (r *Result) targets() []target {
	var all []target
	for _, some := range r.resources {
		all = append(all, some...)
	}
	slices.SortFunc(all, compareTargets)
	return slices.Compact(all)
}

func compareTargets(a, b target) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.profile, b.profile))
}

// mixesShares reports whether shares of one kind are both of whole GPUs and of partitions, so
// that the class alone does not tell them apart.
func (r *Result) mixesShares(kind policy.Kind) bool {
	return slices.ContainsFunc(r.targets(), func(t target) bool { return t.kind == kind && t.profile != "" })
}

// name is the name of the claim template for a kind of device.
func (t target) name() string {
	name := map[policy.Kind]string{
		policy.Whole: "gpu", policy.Partition: "mig", policy.MPS: "mps-share", policy.TimeSlice: "timeslice-share",
	}[t.kind]
	if t.profile != "" {
		name += "-" + manifest.ProfileText(t.profile)
	}
	return name
}

// expression selects the devices in CEL.
func (t target) expression(driver string) string {
	text := manifest.Selector(driver, "type", string(t.kind))
	if t.kind != policy.Whole {
		text += " && " + manifest.Selector(driver, "profile", t.profile)
	}
	return text
}

// values are those of the chart.
type values struct {
	DeviceClasses classValues    `yaml:"deviceClasses"`
	RequestPolicy *requestPolicy `yaml:"requestPolicy,omitempty"`
	SharingPolicy Policy         `yaml:"sharingPolicy"`
}

type classValues struct {
	GPU         classValue            `yaml:"gpu"`
	MPS         classValue            `yaml:"mps"`
	TimeSlice   classValue            `yaml:"timeslice"`
	MIGProfiles map[string]classValue `yaml:"migProfiles,omitempty"`
}

type classValue struct {
	Profile              string `yaml:"profile,omitempty"`
	ExtendedResourceName string `yaml:"extendedResourceName"`
}

type requestPolicy struct {
	DeviceClasses []string `yaml:"deviceClasses"`
}

// classes are the device classes that serve the resources: those that the chart makes, by its
// values, and others with the devices that they are for.
func (r *Result) classes() (chart classValues, others map[string]string) {
	others = map[string]string{}
	of := map[policy.Kind]*classValue{policy.Whole: &chart.GPU, policy.MPS: &chart.MPS, policy.TimeSlice: &chart.TimeSlice}
	for _, resource := range slices.Sorted(maps.Keys(r.resources)) {
		t := r.resources[resource][0]
		class, name := of[t.kind], fmt.Sprintf(classOfProfile, manifest.ProfileText(t.profile))
		_, taken := chart.MIGProfiles[name]
		// A class of the chart serves a resource if it has exactly these devices.
		switch {
		case len(r.resources[resource]) > 1:
			class = nil
		case t.kind == policy.Partition && t.profile != "" && !taken:
			if chart.MIGProfiles == nil {
				chart.MIGProfiles = map[string]classValue{}
			}
			chart.MIGProfiles[name] = classValue{Profile: t.profile, ExtendedResourceName: resource}
			continue
		case t.profile != "" || t.kind != policy.Whole && r.mixesShares(t.kind):
			class = nil
		}
		if class == nil || class.ExtendedResourceName != "" {
			others[strings.TrimPrefix(resource, domain)+extraClass] = resource
			continue
		}
		class.ExtendedResourceName = resource
	}
	return chart, others
}

// PolicyFile returns the policy as the file that the driver reads.
func (r *Result) PolicyFile() ([]byte, error) {
	text, err := manifest.Marshal(r.Policy)
	if err != nil {
		return nil, err
	}
	if _, err := policy.Decode(text); err != nil {
		return nil, fmt.Errorf("the translated policy is not valid: %w", err)
	}
	return text, nil
}

// Values returns the chart's values, with the policy in them.
func (r *Result) Values() ([]byte, error) {
	if _, err := r.PolicyFile(); err != nil {
		return nil, err
	}
	chart, others := r.classes()
	v := values{DeviceClasses: chart, SharingPolicy: r.Policy}
	if len(others) > 0 {
		v.RequestPolicy = &requestPolicy{DeviceClasses: slices.Sorted(maps.Keys(others))}
	}
	return manifest.Marshal(v)
}

// Classes returns the device classes that the chart does not make.
func (r *Result) Classes() ([]byte, error) {
	_, others := r.classes()
	var documents [][]byte
	for _, name := range slices.Sorted(maps.Keys(others)) {
		resource := others[name]
		targets := slices.SortedFunc(slices.Values(r.resources[resource]), compareTargets)
		var any []string
		for _, t := range targets {
			any = append(any, t.expression(r.driver))
		}
		text := any[0]
		if len(any) > 1 {
			text = "((" + strings.Join(any, ") || (") + "))"
		}
		// A kubelet that does not know such resources would start the pod without the device.
		known := fmt.Sprintf("has(device.attributes['%s'].%s)", r.driver, device.ExtendedResources)
		document, err := manifest.DeviceClass(name, resource, fmt.Sprintf("device.driver == '%s' && %s && %s", r.driver, text, known))
		if err != nil {
			return nil, err
		}
		documents = append(documents, document)
	}
	return manifest.Join(documents), nil
}

// Templates returns a claim template for each kind of device.
func (r *Result) Templates() ([]byte, error) {
	var documents [][]byte
	for _, t := range r.targets() {
		request := manifest.Request{Name: "gpu", Class: manifest.ClassOf(t.kind)}
		if t.profile != "" || t.kind != policy.Whole && r.mixesShares(t.kind) {
			request.Selectors = []string{manifest.Selector(r.driver, "profile", t.profile)}
		}
		document, err := manifest.ClaimTemplate("", t.name(), []manifest.Request{request})
		if err != nil {
			return nil, err
		}
		documents = append(documents, document)
	}
	return manifest.Join(documents), nil
}
