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
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	maxEntries    = 256
	maxPartitions = 64
	// maxOffered is how many profiles a policy lists.
	maxOffered = 64
)

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

// migParted reads configurations of mig-parted. It is as strict as that, which refuses fields that it does not know.
type migParted struct {
	reader
	// wanted are the names of the layouts that are translated, none for all, and layouts all, by name.
	wanted  []string
	layouts map[string][]layoutEntry
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
	layouts := map[string][]layoutEntry{}
	for _, c := range configs {
		if err := Expect("mig-parted", c); err != nil {
			return nil, err
		}
		r := &migParted{reader: reader{found: &result.Findings, prefix: c.Path}, wanted: o.Configs, layouts: layouts}
		r.read(c.Root)
		if err := r.Err(); err != nil {
			return nil, fmt.Errorf("%sinvalid configuration of mig-parted: %w", c.Path, err)
		}
	}
	names := slices.Sorted(maps.Keys(layouts))
	if err := o.checkNames(names); err != nil {
		return nil, err
	}
	if len(o.Configs) > 0 {
		names = o.Configs
	}
	result.offerLayouts(layouts, names)
	return result, nil
}

func (r *migParted) read(root *yaml.Node) {
	seen := r.Object(root, nil, map[string]strict.Read{
		"version":     func(n *yaml.Node, at *field.Path) { strict.OneOf(&r.Reader, n, at, []string{"v1"}) },
		"mig-configs": func(n *yaml.Node, at *field.Path) { r.Map(n, at, r.layout) },
	})
	r.require(root, nil, seen, `must be "v1"`, "version")
	r.require(root, nil, seen, "must have a layout", "mig-configs")
}

func (r *migParted) layout(name string, n *yaml.Node, at *field.Path) {
	if _, twice := r.layouts[name]; twice {
		r.Fault(field.Duplicate(at, name))
	}
	r.layouts[name] = nil
	told := r.found
	if len(r.wanted) > 0 && !slices.Contains(r.wanted, name) {
		// It is read, and nothing is to be said of it.
		r.found = &finding.List{}
	}
	r.List(n, at, maxEntries, func(n *yaml.Node, at *field.Path) { r.layouts[name] = append(r.layouts[name], r.entry(n, at)) })
	r.found = told
	if strict.IsEmptyList(n) {
		r.Fault(field.Required(at, "at least one entry"))
	}
}

// entry reads the layout of some GPUs.
func (r *migParted) entry(n *yaml.Node, at *field.Path) layoutEntry {
	var e layoutEntry
	var counts []string
	seen := r.Object(n, at, map[string]strict.Read{
		"device-filter": func(n *yaml.Node, at *field.Path) {
			filter := func(n *yaml.Node, at *field.Path) { e.filters = append(e.filters, r.filter(n, at)...) }
			if n.Kind == yaml.SequenceNode {
				r.List(n, at, maxEntries, filter)
			} else {
				filter(n, at)
			}
		},
		"devices":     strict.Into(&e.all, r.devices),
		"mig-enabled": strict.Into(&e.enabled, r.Bool),
		"mig-devices": func(n *yaml.Node, at *field.Path) {
			r.Map(n, at, func(profile string, n *yaml.Node, at *field.Path) {
				if r.partitions(profile, n, at) {
					e.profiles, counts = append(e.profiles, profile), append(counts, profile+": "+n.Value)
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
		r.tell(finding.Changed, devices, "{}", "nobody need make partitions by hand: those of any profile are made when claims ask for them")
	case e.enabled:
		r.tell(finding.Changed, devices, strings.Join(counts, ", "),
			"there is no layout: partitions of these profiles are made when claims ask for them, in any number that fits, and removed afterwards; nothing keeps room for one of them. A ResourceQuota limits how many a namespace has of a class")
	}
	return e
}

// filter reads which GPUs an entry is for.
func (r *migParted) filter(n *yaml.Node, at *field.Path) []string {
	written, ok := r.String(n, at)
	if !ok || written == "" {
		return nil
	}
	id, subsystem, hasSubsystem := strings.Cut(written, ":")
	packed, err := strconv.ParseUint(id, 0, 32)
	if hasSubsystem {
		_, wrong := strconv.ParseUint(subsystem, 0, 32)
		err = errors.Join(err, wrong)
	}
	if err != nil {
		r.Invalid(n, at, "must be device and vendor of a PCI device as one number, such as 0x20B210DE")
		return nil
	}
	if hasSubsystem {
		r.tell(finding.Lost, at, written, "a policy goes by vendor and device, not by subsystem: the rule is for all boards of this device")
	}
	// The device is in the upper half, the vendor in the lower.
	return []string{fmt.Sprintf("%04x:%04x", packed&0xffff, packed>>16)}
}

// devices reports whether an entry is for all GPUs.
func (r *migParted) devices(n *yaml.Node, at *field.Path) bool {
	if n.Kind == yaml.SequenceNode {
		r.List(n, at, maxEntries, func(n *yaml.Node, at *field.Path) { r.IntBetween(n, at, 0, maxEntries, "; it is a GPU's index") })
		r.tell(finding.Lost, at, text(n), "indexes of GPUs are not the same on every node: all GPUs are offered what any of them had. A rule with uuid is for one GPU")
		return false
	}
	if value, ok := r.String(n, at); ok && value != "all" {
		r.Invalid(n, at, `must be "all" or a list of indexes`)
	}
	return true
}

// partitions reads how many partitions of a profile there are, and reports whether the
// profile can be offered.
func (r *migParted) partitions(profile string, n *yaml.Node, at *field.Path) bool {
	count := r.IntBetween(n, at, 0, maxPartitions, "; it is a number of partitions of one GPU")
	_, whole, isPart := strings.Cut(profile, "c.")
	switch {
	case !profileName.MatchString(profile):
		r.Fault(field.Invalid(at, profile, "must be the name of a MIG profile, such as 1g.10gb"))
		return false
	case isPart:
		r.tell(finding.Lost, at, n.Value, fmt.Sprintf("a partition has one compute instance here: have claims share partitions of %s, with mig.shares in the policy", whole))
		return false
	}
	return count > 0
}

// offerLayouts offers each model of GPU what it is in any of the chosen layouts.
func (r *Result) offerLayouts(all map[string][]layoutEntry, chosen []string) {
	models := sets.New[string]()
	for _, name := range chosen {
		for _, e := range all[name] {
			models.Insert(e.filters...)
		}
	}
	told := func(value, why string) { r.Findings.Add(finding.Changed, "mig-configs", value, why) }
	if len(chosen) > 1 {
		told(strings.Join(chosen, ", "), "nodes choose a layout by the label nvidia.com/mig.config; here a GPU becomes what claims ask for, and is offered what it is in any of these. Name those in use with --config")
	}
	told("", "the MIG manager must not run beside Partage. On Ampere (A100, A30) the MIG mode stays as it is, and a GPU with the mode on is offered as partitions only; later GPUs change it as claims ask")
	general := entriesOf(all, chosen, "")
	if len(general) == 0 {
		told("", "no layout is for GPUs that no device-filter names: these are offered whole, and in partitions of all profiles")
		general = []layoutEntry{{}, {enabled: true}}
	}
	r.Policy.Default = new(r.offerLayout(general))
	for _, model := range sets.List(models) {
		r.Policy.Rules = append(r.Policy.Rules, Rule{
			Name: "pci-" + strings.ReplaceAll(model, ":", "-"), Match: Match{pciDeviceID: model}, Offer: r.offerLayout(entriesOf(all, chosen, model)),
		})
	}
}

// entriesOf returns what GPUs of a model are in the chosen layouts. In each the last entry that
// is for all GPUs replaces those before it.
func entriesOf(all map[string][]layoutEntry, chosen []string, model string) (entries []layoutEntry) {
	for _, name := range chosen {
		before := len(entries)
		for _, e := range all[name] {
			switch {
			case len(e.filters) > 0 && !slices.Contains(e.filters, model):
				continue
			case e.all:
				entries = entries[:before]
			}
			entries = append(entries, e)
		}
	}
	return entries
}

// offerLayout offers what GPUs are in any of some entries, and has a class for each profile.
func (r *Result) offerLayout(entries []layoutEntry) Offer {
	offer := Offer{Kinds: []policy.Kind{}}
	profiles, whole, partitions, any := sets.New[string](), false, false, false
	for _, e := range entries {
		whole, partitions = whole || !e.enabled, partitions || e.enabled
		// One without profiles has partitions of any.
		any = any || e.enabled && len(e.profiles) == 0
		profiles.Insert(e.profiles...)
	}
	if whole {
		offer.Kinds = append(offer.Kinds, policy.Whole)
		r.serve(ResourceGPU, target{kind: policy.Whole})
	}
	if partitions {
		offer.Kinds = append(offer.Kinds, policy.Partition)
	}
	if partitions && !any && len(profiles) <= maxOffered {
		offer.MIG = &MIG{Profiles: new(sets.List(profiles))}
	}
	for profile := range profiles {
		r.serve(migPrefix+manifest.ProfileText(profile), target{policy.Partition, profile})
	}
	return offer
}
