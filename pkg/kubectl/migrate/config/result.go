// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

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

// Policy is a SharingPolicy as people write it. What is left out is as built in.
type Policy struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Rules      []Rule `yaml:"rules,omitempty"`
	Default    *Offer `yaml:"default,omitempty"`
}

// Rule is an offer for some GPUs.
type Rule struct {
	Name  string `yaml:"name"`
	Match Match  `yaml:"match"`
	Offer Offer  `yaml:"offer"`
}

// Match selects GPUs, by a field of theirs.
type Match map[string]string

// Fields of a Match.
const (
	productName = "productName"
	pciDeviceID = "pciDeviceID"
)

// matchFields are all.
var matchFields = []string{productName, "architecture", pciDeviceID, "uuid"}

// Offer is what GPUs are published as.
type Offer struct {
	Kinds   []policy.Kind `yaml:"kinds,flow"`
	MIG     *MIG          `yaml:"mig,omitempty"`
	Sharing `yaml:",inline"`
}

// MIG is which partitions are offered.
type MIG struct {
	// Profiles is nil for all, and points to an empty list for none.
	Profiles *[]string         `yaml:"profiles,flow,omitempty"`
	Shares   []PartitionShares `yaml:"shares,omitempty"`
}

// PartitionShares is how partitions are shared.
type PartitionShares struct {
	Profiles []string `yaml:"profiles,flow"`
	Sharing  `yaml:",inline"`
}

// Sharing is how many clients share a device, by the way in which they do: mps or timeslice.
type Sharing map[string]map[string]int

func sharing(kind policy.Kind, clients int) Sharing {
	return Sharing{string(kind): {"clients": clients}}
}

// Names of extended resources.
const (
	Domain       = "nvidia.com/"
	ResourceGPU  = Domain + "gpu"
	migPrefix    = Domain + "mig-"
	SharedSuffix = ".shared"
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
	return &Result{Policy: Policy{APIVersion: policy.Version, Kind: policy.PolicyKind}, driver: driver, resources: map[string][]target{}}
}

// serve notes that pods which ask for a resource get a kind of device.
func (r *Result) serve(resource string, t target) {
	if !slices.Contains(r.resources[resource], t) {
		r.resources[resource] = append(r.resources[resource], t)
	}
}

// mixesShares reports whether shares of one kind are both of whole GPUs and of partitions, so
// that the class alone does not tell them apart.
func (r *Result) mixesShares(kind policy.Kind) bool {
	all := slices.Concat(slices.Collect(maps.Values(r.resources))...)
	return kind != policy.Whole && slices.ContainsFunc(all, func(t target) bool { return t.kind == kind && t.profile != "" })
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
	DeviceClasses classValues         `yaml:"deviceClasses"`
	RequestPolicy map[string][]string `yaml:"requestPolicy,omitempty"`
	SharingPolicy Policy              `yaml:"sharingPolicy"`
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

// classes are the device classes that serve the resources: those that the chart makes, by its
// values, and others with the resources that they are for.
func (r *Result) classes() (chart classValues, others map[string]string) {
	chart.MIGProfiles, others = map[string]classValue{}, map[string]string{}
	of := map[policy.Kind]*classValue{policy.Whole: &chart.GPU, policy.MPS: &chart.MPS, policy.TimeSlice: &chart.TimeSlice}
	for _, resource := range slices.Sorted(maps.Keys(r.resources)) {
		t := r.resources[resource][0]
		class, profile := of[t.kind], "mig-"+manifest.ProfileText(t.profile)+".nvidia.com"
		_, taken := chart.MIGProfiles[profile]
		// A class of the chart serves a resource if it has exactly these devices.
		switch alone := len(r.resources[resource]) == 1; {
		case alone && t.kind == policy.Partition && t.profile != "" && !taken:
			chart.MIGProfiles[profile] = classValue{t.profile, resource}
		case alone && t.profile == "" && !r.mixesShares(t.kind) && class != nil && class.ExtendedResourceName == "":
			class.ExtendedResourceName = resource
		default:
			others[strings.TrimPrefix(resource, Domain)+".extended.partage.dev"] = resource
		}
	}
	return chart, others
}

// TellClasses tells which resources nothing serves until the classes that the chart does not make are applied.
func (r *Result) TellClasses() {
	_, others := r.classes()
	for _, resource := range slices.Sorted(maps.Values(others)) {
		r.Findings.Add(finding.Needed, resource, "", "the chart makes no class for it, so that pods which ask for it wait: apply those of --print classes, too")
	}
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
		v.RequestPolicy = map[string][]string{"deviceClasses": slices.Sorted(maps.Keys(others))}
	}
	return manifest.Marshal(v)
}

// Classes returns the device classes that the chart does not make.
func (r *Result) Classes() ([]byte, error) {
	_, others := r.classes()
	var documents [][]byte
	for _, name := range slices.Sorted(maps.Keys(others)) {
		targets := slices.SortedFunc(slices.Values(r.resources[others[name]]), func(a, b target) int {
			return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.profile, b.profile))
		})
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
		document, err := manifest.DeviceClass(name, others[name], fmt.Sprintf("device.driver == '%s' && %s && %s", r.driver, text, known))
		if err != nil {
			return nil, err
		}
		documents = append(documents, document)
	}
	return manifest.Join(documents), nil
}
