// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
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

// profileName matches names of MIG profiles, and may have the parts of a compute instance.
var profileName = regexp.MustCompile(`^([0-9]{1,2}c\.)?[0-9]{1,2}g\.[0-9]{1,4}gb([+-][a-z]{1,8}(\.[a-z]{1,8})?){0,2}$`)

// devicePlugin is a configuration of NVIDIA's device plugin, version v1.
type devicePlugin struct {
	migStrategy string
	// kind is how resources are shared, "" where they are not.
	kind   policy.Kind
	rename bool
	// resources are by name.
	resources map[string]replicated
}

// replicated is a resource that is shared.
type replicated struct {
	replicas int
	path     string
}

// DevicePlugin translates configurations of NVIDIA's device plugin.
func DevicePlugin(data []byte, o Options) (*Result, error) {
	if single := o.SingleProfile; single != "" && (!profileName.MatchString(single) || strings.Contains(single, "c.")) {
		return nil, fmt.Errorf("--single-profile: Invalid value: %s: must be a MIG profile such as 1g.10gb", quote.Text(single))
	}
	configs, err := document.Configs(data)
	if err != nil {
		return nil, err
	}
	names, err := namesOf(configs)
	if err != nil {
		return nil, err
	}
	general, err := o.general(names, "; nodes choose one by the label "+nodeLabel+": say for which GPUs others are with --match NAME=productName=GLOB")
	if err != nil {
		return nil, err
	}
	result := newResult(o.Driver)
	for _, c := range configs {
		match, isRule := o.Matches[c.Name]
		if !isRule && c.Name != general {
			result.Findings.Lost(strings.TrimSuffix(c.Path, ": "), "",
				fmt.Sprintf("nodes choose it by the label %s, and a policy goes by GPU, not by node: give --match %s=productName=GLOB for the GPUs that it is for", nodeLabel, c.Name))
			continue
		}
		plugin, err := readDevicePlugin(c, &result.Findings)
		if err != nil {
			return nil, fmt.Errorf("%sinvalid configuration of the device plugin: %w", c.Path, err)
		}
		offer := result.offerOf(plugin, c.Path, o.SingleProfile)
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
	name = strings.Trim(name[:min(len(name), 63)], "_.-")
	if name == "" {
		return "migrated"
	}
	return name
}

// readDevicePlugin is as strict as the device plugin, which ignores what it does not know.
func readDevicePlugin(c document.Config, found *finding.List) (*devicePlugin, error) {
	// Letter case does not count, as in Go's reader of JSON.
	r := &reader{found: found, prefix: c.Path, plain: strings.ToLower}
	plugin := &devicePlugin{migStrategy: strategyNone, resources: map[string]replicated{}}
	var timeSlicing, mps *yaml.Node
	var timeSlicingAt, mpsAt *field.Path
	r.object(c.Root, nil, map[string]strict.Read{
		"version": func(n *yaml.Node, at *field.Path) { strict.OneOf(&r.Reader, n, at, []string{"v1", ""}) },
		"flags":   func(n *yaml.Node, at *field.Path) { r.flags(n, at, plugin) },
		"resources": func(n *yaml.Node, at *field.Path) {
			found.Unread(r.path(at), text(n), "the device plugin ignores it with a warning")
		},
		"sharing": func(n *yaml.Node, at *field.Path) {
			r.object(n, at, map[string]strict.Read{
				"timeSlicing": func(n *yaml.Node, at *field.Path) { timeSlicing, timeSlicingAt = n, at },
				"mps":         func(n *yaml.Node, at *field.Path) { mps, mpsAt = n, at },
			}, r.unknown)
		},
		"imex": func(n *yaml.Node, at *field.Path) {
			found.Lost(r.path(at), text(n), "Partage makes no IMEX channels: use NVIDIA's ComputeDomains driver for them")
		},
	}, r.unknown)
	switch {
	case mps != nil:
		if timeSlicing != nil {
			found.Unread(r.path(timeSlicingAt), text(timeSlicing), "sharing.mps is set, too, and wins")
		}
		plugin.kind = policy.MPS
		r.sharing(mps, mpsAt, plugin)
	case timeSlicing != nil:
		plugin.kind = policy.TimeSlice
		r.sharing(timeSlicing, timeSlicingAt, plugin)
	}
	return plugin, r.Err()
}

func (r *reader) unknown(path, value string) {
	r.found.Unread(path, value, "the device plugin does not know this field")
}

// sharing reads sharing.timeSlicing or sharing.mps.
func (r *reader) sharing(n *yaml.Node, at *field.Path, plugin *devicePlugin) {
	fail := plugin.kind == policy.MPS
	failPath, failValue := at.Child("failRequestsGreaterThanOne"), ""
	seen := r.object(n, at, map[string]strict.Read{
		"renameByDefault": strict.Into(&plugin.rename, r.Bool),
		"failRequestsGreaterThanOne": func(n *yaml.Node, at *field.Path) {
			fail, failValue = r.Bool(n, at), n.Value
		},
		"resources": func(n *yaml.Node, at *field.Path) {
			r.List(n, at, maxResources, func(n *yaml.Node, at *field.Path) { r.resource(n, at, plugin) })
			if strict.IsEmptyList(n) {
				r.Fault(field.Required(at, "at least one"))
			}
		},
	}, r.unknown)
	r.require(n, at, seen, "says what is shared", "resources")
	r.largeRequests(plugin.kind, fail, r.path(failPath), failValue)
}

// largeRequests tells what becomes of requests for several shares.
func (r *reader) largeRequests(kind policy.Kind, fail bool, path, value string) {
	switch {
	case kind == policy.MPS && !fail:
		r.found.Lost(path, value, "a container can have one MPS share only, and is not started with several: one share of a larger part does what several did")
	case kind == policy.MPS:
		r.found.Changed(path, value, "as before, a container can have one share only; the scheduler does not know, and the container is not started")
	case fail:
		r.found.Lost(path, value, "nothing refuses a request for several time-slice shares: it gets shares of as many GPUs, or waits for them")
	default:
		r.found.Changed(path, value, "a request for several shares gets them on different GPUs, or waits; before, they could be of one GPU and gave no more than one")
	}
}

// resource reads one entry of resources.
func (r *reader) resource(n *yaml.Node, at *field.Path, plugin *devicePlugin) {
	var name string
	replicas := 0
	seen := r.object(n, at, map[string]strict.Read{
		"name": func(n *yaml.Node, at *field.Path) { name = r.resourceName(n, at) },
		"rename": func(n *yaml.Node, at *field.Path) {
			r.found.Unread(r.path(at), text(n), "the device plugin ignores it with a warning; renameByDefault is what renames")
		},
		"devices": func(n *yaml.Node, at *field.Path) {
			if n.Kind != yaml.ScalarNode || n.Value != "all" {
				r.found.Unread(r.path(at), text(n), "the device plugin ignores it with a warning, and shares all devices; a rule with uuid shares some only")
			}
		},
		"replicas": func(n *yaml.Node, at *field.Path) {
			replicas = r.IntBetween(n, at, 2, maxReplicas, "")
			if plugin.kind == policy.MPS && replicas > mpsClients {
				r.found.Changed(r.path(at), n.Value, fmt.Sprintf("MPS has %d clients at most, 60 from CUDA 13.1 on; no more are published", mpsClients))
			}
		},
	}, r.unknown)
	r.require(n, at, seen, "each resource has a name and replicas", "name", "replicas")
	if name == "" {
		return
	}
	if _, twice := plugin.resources[name]; twice {
		r.Fault(field.Duplicate(at.Child("name"), name))
	}
	plugin.resources[name] = replicated{replicas, r.path(at)}
}

// resourceName reads the name of a resource, whose domain may be left out.
func (r *reader) resourceName(n *yaml.Node, at *field.Path) string {
	name, ok := r.String(n, at)
	if !ok {
		return ""
	}
	name = domain + strings.TrimPrefix(name, domain)
	profile, isMIG := strings.CutPrefix(name, migPrefix)
	if name == resourceGPU || isMIG && profileName.MatchString(profileOf(profile)) {
		return name
	}
	r.Invalid(n, at, "must be %q, or %q and a MIG profile", resourceGPU, migPrefix)
	return ""
}

// profileOf returns the profile in a resource's name, where a + is a dot: 1g.10gb+me is
// 1g.10gb.me.
func profileOf(text string) string {
	if size, variant, ok := strings.Cut(text, "gb."); ok {
		return size + "gb+" + variant
	}
	return text
}

// offerOf returns what a node with this configuration offered its GPUs as.
func (r *Result) offerOf(p *devicePlugin, path, single string) Offer {
	gpus := p.resources[resourceGPU].replicas
	kind, resource := p.as(resourceGPU, policy.Whole, gpus)
	offer := Offer{Kinds: []policy.Kind{kind}}
	if gpus > 0 {
		offer.Sharing = sharing(kind, gpus)
	}
	r.serve(resource, target{kind: kind})
	shares := r.partitionsOf(p)
	switch p.migStrategy {
	case strategyMixed:
		r.offerMixed(&offer, p, path, shares)
	case strategySingle:
		r.offerSingle(&offer, p, path, gpus, single)
	}
	return offer
}

// partitionsOf returns how many share a partition, by profile.
func (r *Result) partitionsOf(p *devicePlugin) map[string]int {
	shares := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(p.resources)) {
		resource := p.resources[name]
		profile, isMIG := strings.CutPrefix(name, migPrefix)
		switch profile = profileOf(profile); {
		case !isMIG:
		case p.migStrategy != strategyMixed:
			r.Findings.Unread(resource.path, name, fmt.Sprintf("there is no such resource with migStrategy %q", p.migStrategy))
		case strings.Contains(profile, "c."):
			r.Findings.Lost(resource.path, name, "compute instances of a part of a partition are not offered: share the partition instead")
		default:
			shares[profile] = resource.replicas
		}
	}
	return shares
}

// as returns of which kind a resource is with so many replicas, 0 for one that is not shared, and its name.
func (p *devicePlugin) as(resource string, kind policy.Kind, replicas int) (policy.Kind, string) {
	if replicas == 0 {
		return kind, resource
	}
	if p.rename {
		resource += sharedSuffix
	}
	return p.kind, resource
}

// offerMixed offers partitions, each profile by a resource of its own.
func (r *Result) offerMixed(offer *Offer, p *devicePlugin, path string, shares map[string]int) {
	offer.Kinds = append(offer.Kinds, policy.Partition)
	if len(shares) == 0 {
		r.Findings.Changed(path+"flags.migStrategy", p.migStrategy,
			"partitions of any profile are made when claims ask for them. For pods that ask for nvidia.com/mig-PROFILE set the chart's value deviceClasses.mig.extendedResources=Auto, or translate the pods, or the layout with migrate mig-parted")
		return
	}
	if p.kind == policy.MPS {
		r.Findings.Changed(path+"sharing.mps", "", "the device plugin refuses MPS on MIG devices; Partage shares partitions by MPS")
	}
	offer.MIG = &MIG{Shares: partitionShares(p.kind, shares)}
	for profile, replicas := range shares {
		kind, resource := p.as(migPrefix+manifest.ProfileText(profile), policy.Partition, replicas)
		r.serve(resource, target{kind, profile})
	}
	r.Findings.Changed(path+"flags.migStrategy", p.migStrategy,
		"partitions of any profile are made when claims ask for them; those that are shared can also be had alone, until mig.profiles lists which can")
}

// offerSingle offers partitions of one profile under the name of whole GPUs.
func (r *Result) offerSingle(offer *Offer, p *devicePlugin, path string, replicas int, profile string) {
	offer.Kinds = append(offer.Kinds, policy.Partition)
	if profile == "" {
		r.Findings.Lost(path+"flags.migStrategy", p.migStrategy,
			"nvidia.com/gpu is a partition of the profile that all partitions of the node have, which is not said here: give it with --single-profile, such as 1g.10gb")
		return
	}
	r.Findings.Changed(path+"flags.migStrategy", p.migStrategy,
		fmt.Sprintf("partitions of %s are made when claims ask for them, on any GPU that has this profile; pods that ask for the resource may also get a GPU that is not partitioned", profile))
	offer.MIG = &MIG{Profiles: &[]string{profile}}
	if replicas > 0 {
		offer.MIG = &MIG{Profiles: &[]string{}, Shares: partitionShares(p.kind, map[string]int{profile: replicas})}
	}
	kind, resource := p.as(resourceGPU, policy.Partition, replicas)
	r.serve(resource, target{kind, profile})
}
