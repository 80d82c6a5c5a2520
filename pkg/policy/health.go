// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/strict"
)

// Effect is what follows for a device of which something is wrong. All but EffectIgnore
// are effects of taints.
type Effect string

const (
	// EffectIgnore tells those who use the device, and nothing else. It is for XIDs.
	EffectIgnore Effect = "Ignore"
	// EffectNone taints the device, so that it can be seen, and changes nothing.
	EffectNone Effect = "None"
	// EffectNoSchedule keeps the device from being allocated.
	EffectNoSchedule Effect = "NoSchedule"
	// EffectNoExecute also evicts the pods that use it.
	EffectNoExecute Effect = "NoExecute"
)

// byGravity has the gravest first.
var byGravity = []Effect{EffectNoExecute, EffectNoSchedule, EffectNone, EffectIgnore}

// Compare puts the graver effect first.
func (e Effect) Compare(other Effect) int {
	return cmp.Compare(slices.Index(byGravity, e), slices.Index(byGravity, other))
}

// Health is how a node reacts to what is wrong with its GPUs.
type Health struct {
	// QuietPeriod is how long a GPU must be free of errors until one that heals by itself
	// is over. It gets longer for a GPU that fails again and again.
	QuietPeriod time.Duration
	// XIDs are the effects of XIDs that differ from the built-in table's.
	XIDs map[uint64]Effect
	// Conditions are the effects of conditions, by the name of their taint without the
	// domain. All that can be set are there.
	Conditions map[string]Effect
}

// EffectOf returns the effect of a condition.
func (h *Health) EffectOf(condition string) Effect {
	return cmp.Or(h.Conditions[condition], EffectNoSchedule)
}

const (
	defaultQuietPeriod = 10 * time.Minute
	minQuietPeriod     = time.Second
	maxQuietPeriod     = 24 * time.Hour
	// maxXID is far above all that there are. It catches typing errors.
	maxXID         = 9999
	maxHealthRules = 1024
)

// durationText is the plain part of what time.ParseDuration takes.
var durationText = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?(s|m|h)([0-9]+(\.[0-9]+)?(s|m))*$`)

// builtinHealth evicts nobody for a condition: what does not answer may come back. Only
// XIDs do, with which the driver says itself that it does not.
func builtinHealth() Health {
	return Health{
		QuietPeriod: defaultQuietPeriod,
		XIDs:        map[uint64]Effect{},
		Conditions: map[string]Effect{
			"fabric-unhealthy":    EffectNoSchedule,
			"gpu-lost":            EffectNoSchedule,
			"memory-unrepairable": EffectNoSchedule,
			"mps-unhealthy":       EffectNoSchedule,
			"recovery-required":   EffectNoSchedule,
			"reset-required":      EffectNoSchedule,
			"row-remap-failed":    EffectNoSchedule,
			"row-remap-pending":   EffectNone,
			"throttled":           EffectNone,
			"uncorrected-ecc":     EffectNoSchedule,
			"unmonitored":         EffectNone,
			"unresponsive":        EffectNoSchedule,
		},
	}
}

// health reads how a node reacts.
func (r *reader) health(n *yaml.Node, at *field.Path) Health {
	h := builtinHealth()
	r.Object(n, at, map[string]strict.Read{
		"quietPeriod": func(n *yaml.Node, at *field.Path) { r.quietPeriod(n, at, &h.QuietPeriod) },
		"xids": func(n *yaml.Node, at *field.Path) {
			r.List(n, at, maxHealthRules, func(n *yaml.Node, at *field.Path) { r.xid(n, at, h.XIDs) })
		},
		"conditions": func(n *yaml.Node, at *field.Path) {
			seen := map[string]bool{}
			r.List(n, at, maxHealthRules, func(n *yaml.Node, at *field.Path) { r.condition(n, at, h.Conditions, seen) })
		},
	})
	return h
}

func (r *reader) quietPeriod(n *yaml.Node, at *field.Path, into *time.Duration) {
	text, ok := r.String(n, at)
	if !ok {
		return
	}
	period, err := time.ParseDuration(text)
	if err != nil || !durationText.MatchString(text) || period < minQuietPeriod || period > maxQuietPeriod {
		r.Invalid(n, at, "must be a duration between %s and %s, such as \"10m\"", minQuietPeriod, maxQuietPeriod)
		return
	}
	*into = period
}

func (r *reader) xid(n *yaml.Node, at *field.Path, into map[uint64]Effect) {
	var number uint64
	var effect Effect
	seen := r.Object(n, at, map[string]strict.Read{
		"xid": func(n *yaml.Node, at *field.Path) {
			number = uint64(r.IntBetween(n, at, 1, maxXID, "; it is the number in the kernel log"))
		},
		"effect": func(n *yaml.Node, at *field.Path) {
			effect, _ = strict.OneOf(&r.Reader, n, at, byGravity)
		},
	})
	r.require(n, at, seen, "xid", "effect")
	if _, twice := into[number]; twice && number != 0 {
		r.Fault(field.Duplicate(at.Child("xid"), strconv.FormatUint(number, 10)))
	}
	into[number] = effect
}

func (r *reader) condition(n *yaml.Node, at *field.Path, into map[string]Effect, before map[string]bool) {
	var name string
	var effect Effect
	seen := r.Object(n, at, map[string]strict.Read{
		"condition": func(n *yaml.Node, at *field.Path) {
			name, _ = strict.OneOf(&r.Reader, n, at, slices.Sorted(maps.Keys(builtinHealth().Conditions)))
		},
		"effect": func(n *yaml.Node, at *field.Path) {
			effect, _ = strict.OneOf(&r.Reader, n, at, byGravity[:3])
		},
	})
	r.require(n, at, seen, "condition", "effect")
	switch {
	case name == "":
	case before[name]:
		r.Fault(field.Duplicate(at.Child("condition"), name))
	default:
		before[name] = true
		into[name] = effect
	}
}

// require adds a fault for each field that is not there.
func (r *reader) require(n *yaml.Node, at *field.Path, seen map[string]bool, names ...string) {
	if n.Kind != yaml.MappingNode {
		return
	}
	for _, name := range names {
		if !seen[name] {
			r.Fault(field.Required(at.Child(name), "each entry has "+strings.Join(names, " and ")))
		}
	}
}
