// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"regexp"
	"slices"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	// maxClients is more than any hardware serves. It catches typing errors.
	maxClients = 1024
	// maxOvercommit is far more than can work.
	maxOvercommit = 100
	// maxReserved is more than any GPU has.
	maxReserved = 1 << 40
	maxProfiles = 64
)

var (
	kinds      = []Kind{Whole, Partition, MPS, TimeSlice}
	reactions  = []OnClientKilled{KilledReport, KilledRestart}
	priorities = []ClientPriority{PriorityNormal, PriorityBelowNormal}
	intervals  = []Interval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}
	// profileName matches the driver's names of profiles: "1g.10gb", "1g.10gb+me",
	// "1g.24gb+me.all", "2g.48gb-me".
	profileName = regexp.MustCompile(`^[0-9]{1,2}g\.[0-9]{1,4}gb([+-][a-z0-9.]{1,16}){0,2}$`)
	// memoryText keeps exponents short because resource.ParseQuantity expands them.
	memoryText = regexp.MustCompile(`^[0-9]{1,20}(\.[0-9]{0,9})?([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?$`)
)

// offer reads what GPUs are offered as. Fields that are left out are as in the built-in
// policy.
func (r *reader) offer(n *yaml.Node, at *field.Path) Offer {
	offer := Builtin().Default
	var only []Kind
	kindsKnown := true
	seen := r.Object(n, at, map[string]strict.Read{
		"kinds":           func(n *yaml.Node, at *field.Path) { only, kindsKnown = r.kinds(n, at) },
		string(Partition): strict.Into(&offer.Partition, r.partitions),
		string(MPS):       func(n *yaml.Node, at *field.Path) { r.mps(n, at, offer.MPS) },
		string(TimeSlice): func(n *yaml.Node, at *field.Path) { r.timeSlice(n, at, offer.TimeSlice, true) },
	})
	if !seen["kinds"] || !kindsKnown {
		return offer
	}
	for _, kind := range kinds {
		if slices.Contains(only, kind) {
			continue
		}
		if seen[string(kind)] {
			r.Fault(field.Forbidden(at.Child(string(kind)), fmt.Sprintf("%q is not among the kinds that are offered; add it there or remove this section", kind)))
		}
		offer.without(kind)
	}
	return offer
}

func (o *Offer) without(kind Kind) {
	switch kind {
	case Whole:
		o.Whole = false
	case Partition:
		o.Partition = nil
	case MPS:
		o.MPS = nil
	case TimeSlice:
		o.TimeSlice = nil
	}
}

// kinds also reports whether all of them are valid. None means that the GPU is left
// alone.
func (r *reader) kinds(n *yaml.Node, at *field.Path) ([]Kind, bool) {
	before := r.FaultCount()
	var found []Kind
	r.List(n, at, len(kinds), func(n *yaml.Node, at *field.Path) {
		kind, ok := strict.OneOf(&r.Reader, n, at, kinds)
		if ok && slices.Contains(found, kind) {
			r.Fault(field.Duplicate(at, kind))
		}
		found = append(found, kind)
	})
	return found, r.FaultCount() == before
}

func (r *reader) partitions(n *yaml.Node, at *field.Path) *PartitionOffer {
	p := &PartitionOffer{}
	none := false
	seen := r.Object(n, at, map[string]strict.Read{
		"profiles": func(n *yaml.Node, at *field.Path) {
			none = strict.IsEmptyList(n)
			p.Profiles = r.profiles(n, at, map[string]bool{})
		},
		"variants": strict.Into(&p.Variants, r.Bool),
		"shares":   strict.Into(&p.Shares, r.partitionShares),
	})
	if seen["profiles"] && seen["variants"] {
		r.Fault(field.Forbidden(at.Child("variants"), "profiles lists all that are offered; add the variants there, or remove one of the two fields"))
	}
	if none && !seen["shares"] {
		r.Fault(field.Required(at.Child("profiles"),
			fmt.Sprintf("at least one, or shares, which are then all that is offered; leave %q out of the kinds to offer no partitions, or this field to offer all", Partition)))
	}
	return p
}

// profiles reads names of profiles that are not in taken yet, and adds them to it.
func (r *reader) profiles(n *yaml.Node, at *field.Path, taken map[string]bool) []string {
	names := []string{}
	r.List(n, at, maxProfiles, func(n *yaml.Node, at *field.Path) {
		name := r.Pattern(n, at, profileName, `the name of a MIG profile such as "1g.10gb" or "1g.10gb+me"`)
		if taken[name] && name != "" {
			r.Fault(field.Duplicate(at, quote.Short(name)))
		}
		taken[name] = true
		names = append(names, name)
	})
	return names
}

func (r *reader) partitionShares(n *yaml.Node, at *field.Path) []PartitionShares {
	var shares []PartitionShares
	taken := map[string]bool{}
	r.List(n, at, maxProfiles, func(n *yaml.Node, at *field.Path) {
		var s PartitionShares
		builtin := Builtin().Default
		seen := r.Object(n, at, map[string]strict.Read{
			"profiles": func(n *yaml.Node, at *field.Path) {
				s.Profiles = r.profiles(n, at, taken)
				if strict.IsEmptyList(n) {
					r.Fault(field.Required(at, `at least one, such as "1g.10gb"`))
				}
			},
			string(MPS): func(n *yaml.Node, at *field.Path) {
				s.MPS = builtin.MPS
				r.mps(n, at, s.MPS)
			},
			string(TimeSlice): func(n *yaml.Node, at *field.Path) {
				s.TimeSlice = builtin.TimeSlice
				r.timeSlice(n, at, s.TimeSlice, false)
			},
		})
		shares = append(shares, s)
		if n.Kind != yaml.MappingNode {
			return
		}
		if !seen["profiles"] {
			r.Fault(field.Required(at.Child("profiles"), "says which partitions are shared"))
		}
		if !seen[string(MPS)] && !seen[string(TimeSlice)] {
			r.Fault(field.Required(at, fmt.Sprintf("%q, %q or both: they say how the partitions are shared", MPS, TimeSlice)))
		}
	})
	if strict.IsEmptyList(n) {
		r.Fault(field.Required(at, "at least one; leave the field out to share no partitions"))
	}
	return shares
}

// mps reads into o, which has the defaults.
func (r *reader) mps(n *yaml.Node, at *field.Path, o *MPSOffer) {
	r.Object(n, at, map[string]strict.Read{
		"clients": func(n *yaml.Node, at *field.Path) {
			o.Clients = r.IntBetween(n, at, 1, maxClients, "; the hardware serves 48 or 60, and a partition its part of them, which are the limit on each device")
		},
		"memoryOvercommit":  func(n *yaml.Node, at *field.Path) { o.MemoryOvercommit = r.NumberBetween(n, at, 1, maxOvercommit) },
		"computeOvercommit": func(n *yaml.Node, at *field.Path) { o.ComputeOvercommit = r.NumberBetween(n, at, 1, maxOvercommit) },
		"reservedMemory":    strict.Into(&o.ReservedMemoryBytes, r.memory),
		"serverMemory":      strict.Into(&o.ServerMemoryBytes, r.someMemory),
		"contextMemory":     strict.Into(&o.ContextMemoryBytes, r.someMemory),
		"onClientKilled":    func(n *yaml.Node, at *field.Path) { o.OnClientKilled, _ = strict.OneOf(&r.Reader, n, at, reactions) },
		"clientPriority":    func(n *yaml.Node, at *field.Path) { o.ClientPriority, _ = strict.OneOf(&r.Reader, n, at, priorities) },
	})
}

// timeSlice reads into o, which has the defaults.
func (r *reader) timeSlice(n *yaml.Node, at *field.Path, o *TimeSliceOffer, hasInterval bool) {
	fields := map[string]strict.Read{
		"clients":          func(n *yaml.Node, at *field.Path) { o.Clients = r.IntBetween(n, at, 1, maxClients, "") },
		"memoryOvercommit": func(n *yaml.Node, at *field.Path) { o.MemoryOvercommit = r.NumberBetween(n, at, 1, maxOvercommit) },
		"interval":         func(n *yaml.Node, at *field.Path) { o.Interval, _ = strict.OneOf(&r.Reader, n, at, intervals) },
	}
	if !hasInterval {
		fields["interval"] = func(_ *yaml.Node, at *field.Path) {
			r.Fault(field.Forbidden(at, "intervals are for whole GPUs only, they have no effect on MIG partitions"))
		}
	}
	r.Object(n, at, fields)
}

// someMemory reads an amount of memory whose default is not a number.
func (r *reader) someMemory(n *yaml.Node, at *field.Path) *int64 {
	return new(r.memory(n, at))
}

// memory reads an amount of memory, given as a quantity or as a number of bytes.
func (r *reader) memory(n *yaml.Node, at *field.Path) int64 {
	const want = `must be a quantity of memory such as "512Mi" or "1Gi"`
	isNumber := n.Kind == yaml.ScalarNode && (n.ShortTag() == "!!int" || n.ShortTag() == "!!float")
	if !isNumber {
		if _, ok := r.String(n, at); !ok {
			return 0
		}
	}
	if !memoryText.MatchString(n.Value) {
		r.Invalid(n, at, want)
		return 0
	}
	quantity, err := resource.ParseQuantity(n.Value)
	if err != nil {
		r.Invalid(n, at, want+": %v", err)
		return 0
	}
	if quantity.CmpInt64(maxReserved) > 0 {
		r.Invalid(n, at, "must be at most 1Ti")
		return 0
	}
	return quantity.Value()
}
