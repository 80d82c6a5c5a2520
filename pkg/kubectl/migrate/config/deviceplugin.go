// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	strategyNone   = "none"
	strategySingle = "single"
	strategyMixed  = "mixed"
	// maxReplicas is what a policy takes.
	maxReplicas  = 1024
	maxResources = 256
	// mpsClients is how many clients MPS has had at most before CUDA 13.1.
	mpsClients = 48
	// nodeLabel is the label by which a node chooses one of several configurations.
	nodeLabel = "nvidia.com/device-plugin.config"
)

// Why flags are not translated.
const (
	whyCDI     = "containers get their devices by CDI, and nothing else"
	whyLabels  = "it is of GPU feature discovery, which can go on running for those who read its labels"
	whyMachine = "what a host has beside GPUs is not for Partage to mount: use the driver of that device"
)

// The flags of the device plugin and of GPU feature discovery, beside migStrategy.
var (
	flagReasons = map[string]string{
		"failOnInitError":         "the plugin runs everywhere, and is ready on nodes without a GPU",
		"mpsRoot":                 "set the chart's value host.mpsDir, if its default does not do",
		"nvidiaDriverRoot":        "set the chart's value host.driverRoot to it",
		"nvidiaDevRoot":           "set the chart's value host.devRoot to it, if auto does not find it",
		"gdrcopyEnabled":          whyMachine,
		"gdsEnabled":              whyMachine,
		"mofedEnabled":            whyMachine,
		"useNodeFeatureAPI":       whyLabels,
		"deviceDiscoveryStrategy": "GPUs are found through NVML",
	}
	pluginFlagReasons = map[string]string{
		"passDeviceSpecs":               whyCDI,
		"deviceListStrategy":            whyCDI,
		"deviceIDStrategy":              whyCDI,
		"cdiAnnotationPrefix":           whyCDI,
		"nvidiaCTKPath":                 whyCDI,
		"containerDriverRoot":           "set the chart's value host.driverRoot to where the driver is on the host",
		"sharedDevicesAllocationPolicy": "the scheduler takes the first GPU with room, and so fills one after the other",
	}
	discoveryFlagReasons = map[string]string{
		"oneshot": whyLabels, "noTimestamp": whyLabels, "sleepInterval": whyLabels, "outputFile": whyLabels, "machineTypeFile": whyLabels,
	}
)

// profileName matches names of MIG profiles, and may have the parts of a compute instance.
var profileName = regexp.MustCompile(`^([0-9]{1,2}c\.)?[0-9]{1,2}g\.[0-9]{1,4}gb([+-][a-z]{1,8}(\.[a-z]{1,8})?){0,2}$`)

// IsProfile reports whether a text can be the name of a MIG profile.
func IsProfile(text string) bool {
	return profileName.MatchString(text) && !strings.Contains(text, "c.")
}

// ProfileOf returns the profile that an extended resource of the device plugin is for, and whether its partitions are shared, or "".
func ProfileOf(resource string) (profile string, shared bool) {
	name, isMIG := strings.CutPrefix(resource, migPrefix)
	name, shared = strings.CutSuffix(name, SharedSuffix)
	if profile = profileOf(name); !isMIG || !IsProfile(profile) {
		return "", false
	}
	return profile, shared
}

// devicePlugin reads a configuration of NVIDIA's device plugin, version v1. It is as strict as the device plugin, which ignores what it does not
// know.
type devicePlugin struct {
	reader
	unknown     strict.Read
	migStrategy string
	// kind is how resources are shared, "" where they are not.
	kind   policy.Kind
	rename bool
	// resources are those that are shared, by name.
	resources map[string]replicated
}

type replicated struct {
	replicas int
	at       *field.Path
}

// DevicePlugin translates configurations of NVIDIA's device plugin.
func DevicePlugin(data []byte, o Options) (*Result, error) {
	if single := o.SingleProfile; single != "" && !IsProfile(single) {
		return nil, fmt.Errorf("--single-profile: Invalid value: %s: must be a MIG profile such as 1g.10gb", quote.Text(single))
	}
	configs, err := document.Configs(data)
	if err == nil {
		err = Expect("device-plugin", configs...)
	}
	if err != nil {
		return nil, err
	}
	general, err := o.general(configs, "; nodes choose one by the label "+nodeLabel+": say for which GPUs others are with --match NAME=productName=GLOB")
	if err != nil {
		return nil, err
	}
	result := newResult(o.Driver)
	for _, c := range configs {
		match, isRule := o.Matches[c.Name]
		if !isRule && c.Name != general {
			result.Findings.Add(finding.Lost, strings.TrimSuffix(c.Path, ": "), "",
				fmt.Sprintf("nodes choose it by the label %s, and a policy goes by GPU, not by node: give --match %s=productName=GLOB for the GPUs that it is for", nodeLabel, c.Name))
			continue
		}
		if err := Expect("device-plugin", c); err != nil {
			return nil, err
		}
		// Letter case does not count, as in Go's reader of JSON.
		p := &devicePlugin{reader: reader{found: &result.Findings, prefix: c.Path, plain: strings.ToLower}, migStrategy: strategyNone, resources: map[string]replicated{}}
		p.read(c.Root)
		if err := p.Err(); err != nil {
			return nil, fmt.Errorf("%sinvalid configuration of the device plugin: %w", c.Path, err)
		}
		offer := p.offer(result, o.SingleProfile)
		if c.Name == general {
			result.Policy.Default = &offer
		}
		if isRule {
			result.Policy.Rules = append(result.Policy.Rules, Rule{Name: ruleName(c.Name), Match: match, Offer: offer})
		}
	}
	return result, nil
}

// ruleName makes a name for a rule.
func ruleName(name string) string {
	name = regexp.MustCompile(`[^0-9A-Za-z_.-]+`).ReplaceAllString(name, "-")
	return cmp.Or(strings.Trim(name[:min(len(name), 63)], "_.-"), "migrated")
}

func (r *devicePlugin) read(root *yaml.Node) {
	r.unknown = r.told(finding.Unread, "the device plugin does not know this field")
	section := func(fields map[string]strict.Read) strict.Read {
		return func(n *yaml.Node, at *field.Path) { r.object(n, at, fields, r.unknown) }
	}
	flags := r.lost(flagReasons)
	flags["plugin"], flags["gfd"] = section(r.lost(pluginFlagReasons)), section(r.lost(discoveryFlagReasons))
	flags["migStrategy"] = func(n *yaml.Node, at *field.Path) {
		strategy, _ := strict.OneOf(&r.Reader, n, at, []string{strategyNone, strategySingle, strategyMixed, ""})
		r.migStrategy = cmp.Or(strategy, strategyNone)
	}
	section(map[string]strict.Read{
		"version":   func(n *yaml.Node, at *field.Path) { strict.OneOf(&r.Reader, n, at, []string{"v1", ""}) },
		"flags":     section(flags),
		"resources": r.told(finding.Unread, "the device plugin ignores it with a warning"),
		"sharing":   r.shares,
		"imex":      r.told(finding.Lost, "Partage makes no IMEX channels: use NVIDIA's ComputeDomains driver for them"),
	})(root, nil)
}

// shares reads sharing, of which MPS wins.
func (r *devicePlugin) shares(n *yaml.Node, at *field.Path) {
	var timeSlicing *yaml.Node
	r.object(n, at, map[string]strict.Read{
		"timeSlicing": func(n *yaml.Node, _ *field.Path) { timeSlicing = n },
		"mps":         func(n *yaml.Node, at *field.Path) { r.sharing(policy.MPS, n, at) },
	}, r.unknown)
	switch at := at.Child("timeSlicing"); {
	case timeSlicing != nil && r.kind == policy.MPS:
		r.tell(finding.Unread, at, text(timeSlicing), "sharing.mps is set, too, and wins")
	case timeSlicing != nil:
		r.sharing(policy.TimeSlice, timeSlicing, at)
	}
}

// sharing reads sharing.timeSlicing or sharing.mps.
func (r *devicePlugin) sharing(kind policy.Kind, n *yaml.Node, at *field.Path) {
	r.kind = kind
	fail, failAt, failValue := kind == policy.MPS, at.Child("failRequestsGreaterThanOne"), ""
	seen := r.object(n, at, map[string]strict.Read{
		"renameByDefault":            strict.Into(&r.rename, r.Bool),
		"failRequestsGreaterThanOne": func(n *yaml.Node, at *field.Path) { fail, failValue = r.Bool(n, at), n.Value },
		"resources": func(n *yaml.Node, at *field.Path) {
			r.List(n, at, maxResources, r.resource)
			if strict.IsEmptyList(n) {
				r.Fault(field.Required(at, "at least one"))
			}
		},
	}, r.unknown)
	r.require(n, at, seen, "says what is shared", "resources")
	// What becomes of requests for several shares.
	told := map[policy.Kind]map[bool]finding.Finding{
		policy.MPS: {
			false: {Kind: finding.Lost, Why: "a container can have one MPS share only, and is not started with several: one share of a larger part does what several did"},
			true:  {Kind: finding.Changed, Why: "as before, a container can have one share only; the scheduler does not know, and the container is not started"},
		},
		policy.TimeSlice: {
			true:  {Kind: finding.Lost, Why: "nothing refuses a request for several time-slice shares: it gets shares of as many GPUs, or waits for them"},
			false: {Kind: finding.Changed, Why: "a request for several shares gets them on different GPUs, or waits; before, they could be of one GPU and gave no more than one"},
		},
	}[kind][fail]
	r.tell(told.Kind, failAt, failValue, told.Why)
}

// resource reads one entry of resources.
func (r *devicePlugin) resource(n *yaml.Node, at *field.Path) {
	var name string
	replicas := 0
	seen := r.object(n, at, map[string]strict.Read{
		"name":   func(n *yaml.Node, at *field.Path) { name = r.resourceName(n, at) },
		"rename": r.told(finding.Unread, "the device plugin ignores it with a warning; renameByDefault is what renames"),
		"devices": func(n *yaml.Node, at *field.Path) {
			if n.Kind != yaml.ScalarNode || n.Value != "all" {
				r.tell(finding.Unread, at, text(n), "the device plugin ignores it with a warning, and shares all devices; a rule with uuid shares some only")
			}
		},
		"replicas": func(n *yaml.Node, at *field.Path) {
			replicas = r.IntBetween(n, at, 2, maxReplicas, "")
			if r.kind == policy.MPS && replicas > mpsClients {
				r.tell(finding.Changed, at, n.Value, fmt.Sprintf("MPS has %d clients at most, 60 from CUDA 13.1 on; no more are published", mpsClients))
			}
		},
	}, r.unknown)
	r.require(n, at, seen, "each resource has a name and replicas", "name", "replicas")
	if _, twice := r.resources[name]; twice {
		r.Fault(field.Duplicate(at.Child("name"), name))
	}
	if name != "" {
		r.resources[name] = replicated{replicas, at}
	}
}

// resourceName reads the name of a resource, whose domain may be left out.
func (r *devicePlugin) resourceName(n *yaml.Node, at *field.Path) string {
	name, ok := r.String(n, at)
	name = Domain + strings.TrimPrefix(name, Domain)
	profile, isMIG := strings.CutPrefix(name, migPrefix)
	if ok && (name == ResourceGPU || isMIG && profileName.MatchString(profileOf(profile))) {
		return name
	}
	if ok {
		r.Invalid(n, at, "must be %q, or %q and a MIG profile", ResourceGPU, migPrefix)
	}
	return ""
}

// profileOf returns the profile in a resource's name, where a + is a dot: 1g.10gb+me is
// 1g.10gb.me.
func profileOf(text string) string { return strings.Replace(text, "gb.", "gb+", 1) }

// as returns of which kind a resource is with so many replicas, 0 for one that is not shared, and its name.
func (r *devicePlugin) as(resource string, kind policy.Kind, replicas int) (policy.Kind, string) {
	switch {
	case replicas == 0:
		return kind, resource
	case r.rename:
		return r.kind, resource + SharedSuffix
	}
	return r.kind, resource
}

// offer returns what a node with this configuration offered its GPUs as.
func (r *devicePlugin) offer(result *Result, single string) Offer {
	gpus := r.resources[ResourceGPU].replicas
	kind, resource := r.as(ResourceGPU, policy.Whole, gpus)
	offer := Offer{Kinds: []policy.Kind{kind}}
	if gpus > 0 {
		offer.Sharing = sharing(kind, gpus)
	}
	result.serve(resource, target{kind: kind})
	shares := r.partitions()
	if r.migStrategy == strategyNone {
		return offer
	}
	offer.Kinds = append(offer.Kinds, policy.Partition)
	told := func(kind finding.Kind, why string) {
		r.tell(kind, field.NewPath("flags", "migStrategy"), r.migStrategy, why)
	}
	serve := func(resource, profile string, replicas int) {
		kind, resource := r.as(resource, policy.Partition, replicas)
		result.serve(resource, target{kind, profile})
	}
	switch {
	case r.migStrategy == strategySingle && single == "":
		told(finding.Lost, "nvidia.com/gpu is a partition of the profile that all partitions of the node have, which is not said here: give it with --single-profile, such as 1g.10gb")
	case r.migStrategy == strategySingle:
		told(finding.Changed, fmt.Sprintf("partitions of %s are made when claims ask for them, on any GPU that has this profile; pods that ask for the resource may also get a GPU that is not partitioned", single))
		offer.MIG = &MIG{Profiles: &[]string{single}}
		if gpus > 0 {
			offer.MIG = &MIG{Profiles: &[]string{}, Shares: []PartitionShares{{[]string{single}, sharing(r.kind, gpus)}}}
		}
		serve(ResourceGPU, single, gpus)
	case len(shares) == 0:
		told(finding.Changed, "partitions of any profile are made when claims ask for them. For pods that ask for nvidia.com/mig-PROFILE set the chart's value deviceClasses.mig.extendedResources=Auto, or translate the pods, or the layout with migrate mig-parted")
	default:
		if r.kind == policy.MPS {
			r.tell(finding.Changed, field.NewPath("sharing", "mps"), "", "the device plugin refuses MPS on MIG devices; Partage shares partitions by MPS")
		}
		offer.MIG = &MIG{}
		for _, profile := range slices.Sorted(maps.Keys(shares)) {
			offer.MIG.Shares = append(offer.MIG.Shares, PartitionShares{[]string{profile}, sharing(r.kind, shares[profile])})
			serve(migPrefix+manifest.ProfileText(profile), profile, shares[profile])
		}
		told(finding.Changed, "partitions of any profile are made when claims ask for them; those that are shared can also be had alone, until mig.profiles lists which can")
	}
	return offer
}

// partitions returns how many share a partition, by profile.
func (r *devicePlugin) partitions() map[string]int {
	shares := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(r.resources)) {
		resource := r.resources[name]
		profile, isMIG := strings.CutPrefix(name, migPrefix)
		switch profile = profileOf(profile); {
		case !isMIG:
		case r.migStrategy != strategyMixed:
			r.tell(finding.Unread, resource.at, name, fmt.Sprintf("there is no such resource with migStrategy %q", r.migStrategy))
		case strings.Contains(profile, "c."):
			r.tell(finding.Lost, resource.at, name, "compute instances of a part of a partition are not offered: share the partition instead")
		default:
			shares[profile] = resource.replicas
		}
	}
	return shares
}
