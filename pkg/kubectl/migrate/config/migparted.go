// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	maxLayouts    = 1024
	maxEntries    = 256
	maxPartitions = 64
	// maxOffered is how many profiles a policy lists.
	maxOffered = 64
)

// layouts are the configurations of one file, by name.
type layouts map[string][]layoutEntry

// layoutEntry is the layout of some GPUs.
type layoutEntry struct {
	// filters are vendor and device of the GPUs, "10de:20b2"; none for all GPUs.
	filters []string
	// all says that the entry is for all GPUs of the node, not for some of them.
	all     bool
	enabled bool
	// profiles are of the partitions. None, with MIG enabled, means that others make them.
	profiles []string
}

// MIGParted translates configurations of NVIDIA's mig-parted and MIG manager.
func MIGParted(data []byte, o Options) (*Result, error) {
	configs, err := document.Configs(data)
	if err != nil {
		return nil, err
	}
	if len(o.Matches) > 0 {
		return nil, errors.New("--match: Forbidden: a layout says itself, by device-filter, which GPUs it is for")
	}
	result := newResult(o.Driver)
	all := layouts{}
	for _, c := range configs {
		r := &layoutReader{reader: reader{found: &result.Findings, prefix: c.Path}, wanted: o.Configs, into: all}
		r.layouts(c.Root)
		if err := r.Err(); err != nil {
			return nil, fmt.Errorf("%sinvalid configuration of mig-parted: %w", c.Path, err)
		}
	}
	names := slices.Sorted(maps.Keys(all))
	if err := o.checkNames(names); err != nil {
		return nil, err
	}
	chosen := o.Configs
	if len(chosen) == 0 {
		chosen = names
	}
	result.offerLayouts(all, chosen)
	return result, nil
}

// layoutReader is as strict as mig-parted, which refuses fields that it does not know.
type layoutReader struct {
	reader
	// wanted are the names of the layouts that are translated, none for all.
	wanted []string
	into   layouts
}

func (r *layoutReader) layouts(root *yaml.Node) {
	seen := r.Object(root, nil, map[string]strict.Read{
		"version": func(n *yaml.Node, at *field.Path) { strict.OneOf(&r.Reader, n, at, []string{"v1"}) },
		"mig-configs": func(n *yaml.Node, at *field.Path) {
			if n.Kind == yaml.MappingNode && len(n.Content)/2 > maxLayouts {
				r.Fault(field.TooMany(at, len(n.Content)/2, maxLayouts))
				return
			}
			r.Map(n, at, r.layout)
		},
	})
	r.require(root, nil, seen, `must be "v1"`, "version")
	r.require(root, nil, seen, "must have a layout", "mig-configs")
}

func (r *layoutReader) layout(name string, n *yaml.Node, at *field.Path) {
	if _, twice := r.into[name]; twice {
		r.Fault(field.Duplicate(at, name))
	}
	r.into[name] = nil
	told := r.found
	if len(r.wanted) > 0 && !slices.Contains(r.wanted, name) {
		// It is read, and nothing is to be said of it.
		r.found = &finding.List{}
	}
	r.List(n, at, maxEntries, func(n *yaml.Node, at *field.Path) { r.into[name] = append(r.into[name], r.entry(n, at)) })
	r.found = told
	if strict.IsEmptyList(n) {
		r.Fault(field.Required(at, "at least one entry"))
	}
}

// entry reads the layout of some GPUs.
func (r *layoutReader) entry(n *yaml.Node, at *field.Path) layoutEntry {
	var e layoutEntry
	var counts []string
	seen := r.Object(n, at, map[string]strict.Read{
		"device-filter": func(n *yaml.Node, at *field.Path) { e.filters = r.filters(n, at) },
		"devices":       func(n *yaml.Node, at *field.Path) { e.all = r.devices(n, at) },
		"mig-enabled":   strict.Into(&e.enabled, r.Bool),
		"mig-devices": func(n *yaml.Node, at *field.Path) {
			r.Map(n, at, func(profile string, n *yaml.Node, at *field.Path) {
				if r.partitions(profile, n, at) {
					e.profiles = append(e.profiles, profile)
					counts = append(counts, profile+": "+n.Value)
				}
			})
		},
	})
	r.require(n, at, seen, "each entry has devices and mig-enabled", "devices", "mig-enabled")
	switch devices := at.Child("mig-devices"); {
	case e.enabled && !seen["mig-devices"]:
		r.Fault(field.Required(devices, "must list partitions where mig-enabled is true; {} for none"))
	case !e.enabled && len(e.profiles) > 0:
		r.Fault(field.Forbidden(devices, "mig-enabled is false"))
	case e.enabled && len(counts) == 0:
		r.found.Changed(r.path(devices), "{}", "nobody need make partitions by hand: those of any profile are made when claims ask for them")
	case e.enabled:
		r.found.Changed(r.path(devices), strings.Join(counts, ", "),
			"there is no layout: partitions of these profiles are made when claims ask for them, in any number that fits, and removed afterwards; nothing keeps room for one of them. A ResourceQuota limits how many a namespace has of a class")
	}
	return e
}

// filters reads the GPUs that an entry is for.
func (r *layoutReader) filters(n *yaml.Node, at *field.Path) []string {
	var filters []string
	read := func(n *yaml.Node, at *field.Path) {
		written, ok := r.String(n, at)
		if !ok || written == "" {
			return
		}
		id, subsystem, hasSubsystem := strings.Cut(written, ":")
		packed, err := strconv.ParseUint(id, 0, 32)
		if err == nil && hasSubsystem {
			_, err = strconv.ParseUint(subsystem, 0, 32)
		}
		if err != nil {
			r.Invalid(n, at, "must be device and vendor of a PCI device as one number, such as 0x20B210DE")
			return
		}
		if hasSubsystem {
			r.found.Lost(r.path(at), written, "a policy goes by vendor and device, not by subsystem: the rule is for all boards of this device")
		}
		// The device is in the upper half, the vendor in the lower.
		filter := fmt.Sprintf("%04x:%04x", packed&0xffff, packed>>16)
		if !slices.Contains(filters, filter) {
			filters = append(filters, filter)
		}
	}
	if n.Kind == yaml.SequenceNode {
		r.List(n, at, maxEntries, read)
	} else {
		read(n, at)
	}
	return filters
}

// devices reports whether an entry is for all GPUs.
func (r *layoutReader) devices(n *yaml.Node, at *field.Path) bool {
	if n.Kind == yaml.SequenceNode {
		r.List(n, at, maxEntries, func(n *yaml.Node, at *field.Path) { r.IntBetween(n, at, 0, maxEntries, "; it is a GPU's index") })
		r.found.Lost(r.path(at), text(n), "indexes of GPUs are not the same on every node: all GPUs are offered what any of them had. A rule with uuid is for one GPU")
		return false
	}
	if value, ok := r.String(n, at); ok && value != "all" {
		r.Invalid(n, at, `must be "all" or a list of indexes`)
	}
	return true
}

// partitions reads how many partitions of a profile there are, and reports whether the
// profile can be offered.
func (r *layoutReader) partitions(profile string, n *yaml.Node, at *field.Path) bool {
	count := r.IntBetween(n, at, 0, maxPartitions, "; it is a number of partitions of one GPU")
	switch {
	case !profileName.MatchString(profile):
		r.Fault(field.Invalid(at, profile, "must be the name of a MIG profile, such as 1g.10gb"))
		return false
	case strings.Contains(profile, "c."):
		_, whole, _ := strings.Cut(profile, "c.")
		r.found.Lost(r.path(at), n.Value, fmt.Sprintf("a partition has one compute instance here: have claims share partitions of %s, with mig.shares in the policy", whole))
		return false
	}
	return count > 0
}

// offerLayouts offers each model of GPU what it is in any of the chosen layouts.
func (r *Result) offerLayouts(all layouts, chosen []string) {
	models := map[string]bool{}
	for _, name := range chosen {
		for _, e := range all[name] {
			for _, filter := range e.filters {
				models[filter] = true
			}
		}
	}
	if len(chosen) > 1 {
		r.Findings.Changed("mig-configs", strings.Join(chosen, ", "),
			"nodes choose a layout by the label nvidia.com/mig.config; here a GPU becomes what claims ask for, and is offered what it is in any of these. Name those in use with --config")
	}
	r.Findings.Changed("mig-configs", "", "the MIG manager must not run beside Partage. On Ampere (A100, A30) the MIG mode stays as it is, and a GPU with the mode on is offered as partitions only; later GPUs change it as claims ask")
	if general := all.of(chosen, ""); len(general) > 0 {
		r.Policy.Default = new(r.offerLayout(general))
	} else {
		r.Findings.Changed("mig-configs", "", "no layout is for GPUs that no device-filter names: these are offered whole, and in partitions of all profiles")
		r.Policy.Default = &Offer{Kinds: []policy.Kind{policy.Whole, policy.Partition}}
		r.serve(resourceGPU, target{kind: policy.Whole})
	}
	for _, model := range slices.Sorted(maps.Keys(models)) {
		r.Policy.Rules = append(r.Policy.Rules, Rule{
			Name: "pci-" + strings.ReplaceAll(model, ":", "-"), Match: Match{PCIDeviceID: model}, Offer: r.offerLayout(all.of(chosen, model)),
		})
	}
}

// of returns what GPUs of a model are in the chosen layouts. In each the last entry that
// is for all GPUs replaces those before it.
func (all layouts) of(chosen []string, model string) (entries []layoutEntry) {
	for _, name := range chosen {
		var own []layoutEntry
		for _, e := range all[name] {
			if len(e.filters) > 0 && !slices.Contains(e.filters, model) {
				continue
			}
			if e.all {
				own = nil
			}
			own = append(own, e)
		}
		entries = append(entries, own...)
	}
	return entries
}

// offerLayout offers what GPUs are in any of some entries, and has a class for each profile.
func (r *Result) offerLayout(entries []layoutEntry) Offer {
	offer := Offer{Kinds: []policy.Kind{}}
	whole := func(e layoutEntry) bool { return !e.enabled }
	if slices.ContainsFunc(entries, whole) {
		offer.Kinds = append(offer.Kinds, policy.Whole)
		r.serve(resourceGPU, target{kind: policy.Whole})
	}
	partitions := slices.DeleteFunc(entries, whole)
	var profiles []string
	for _, e := range partitions {
		profiles = append(profiles, e.profiles...)
	}
	slices.Sort(profiles)
	profiles = slices.Compact(profiles)
	if len(partitions) > 0 {
		offer.Kinds = append(offer.Kinds, policy.Partition)
		// One without profiles has partitions of any.
		any := slices.ContainsFunc(partitions, func(e layoutEntry) bool { return len(e.profiles) == 0 })
		if !any && len(profiles) <= maxOffered {
			offer.MIG = &MIG{Profiles: &profiles}
		}
	}
	for _, profile := range profiles {
		r.serve(migPrefix+manifest.ProfileText(profile), target{kind: policy.Partition, profile: profile})
	}
	return offer
}
