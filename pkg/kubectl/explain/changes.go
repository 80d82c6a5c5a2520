// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"maps"
	"regexp"
	"slices"
	"sort"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	// mostValues is how many values are suggested in place of one, and mostTries how many amounts are tried.
	mostValues = 3
	mostTries  = 8
)

// changes tries those of a request that may help, the smallest first.
func (h *helper) changes(ctx context.Context, a ask) {
	h.otherValues(ctx, a)
	h.smallerAmounts(ctx, a)
	h.capacities(ctx, a)
	h.fewerDevices(ctx, a)
	for i, s := range *a.Selectors {
		if s.CEL != nil {
			h.confirm(ctx, a, DropSelector, func(a ask) { *a.Selectors = slices.Delete(*a.Selectors, i, i+1) }, "without selector %d: %s", i, oneLine(s.CEL.Expression))
		}
	}
	h.tolerations(ctx, a)
}

// comparison is one that a selector makes: of an attribute or capacity with a value.
type comparison struct {
	name, value string
	// with returns the selector's expression with another value.
	with func(value string) string
}

// equality finds comparisons of an attribute with a text, such as .profile == '1g.10gb', and quantity those of an amount.
var (
	equality = regexp.MustCompile(`\.([A-Za-z_][A-Za-z0-9_]*)\s*==\s*(?:'([^'\\]*)'|"([^"\\]*)")`)
	quantity = regexp.MustCompile(`\.([a-zA-Z_][a-zA-Z0-9_]*)\.(?:compareTo|isGreaterThan)\(quantity\((?:'([^']*)'|"([^"]*)")\)\)`)
)

// comparisons returns those of a form that a selector makes.
func comparisons(s resourceapi.DeviceSelector, form *regexp.Regexp) (out []comparison) {
	if s.CEL == nil {
		return nil
	}
	e := s.CEL.Expression
	for _, at := range form.FindAllStringSubmatchIndex(e, -1) {
		from, to := max(at[4], at[6]), max(at[5], at[7])
		out = append(out, comparison{e[at[2]:at[3]], e[from:to], func(value string) string {
			// What devices publish is not to be part of an expression.
			return strings.ReplaceAll(e, e[at[0]:at[1]], e[at[0]:from-1]+quote.CEL(value)+e[to+1:at[1]])
		}})
	}
	return out
}

// inSelectors tries other values, the best first, in place of those that selectors compare, until so many help.
func (h *helper) inSelectors(ctx context.Context, a ask, form *regexp.Regexp, most int, others func(comparison) []string) {
	for i, s := range *a.Selectors {
		for _, c := range comparisons(s, form) {
			confirmed := 0
			for _, value := range others(c) {
				edit := func(a ask) { (*a.Selectors)[i].CEL = &resourceapi.CELDeviceSelector{Expression: c.with(value)} }
				if confirmed < most && value != c.value && h.confirm(ctx, a, ChangeValue, edit, "with %s %s in place of %s", c.name, value, c.value) {
					confirmed++
				}
			}
		}
	}
}

// otherValues are what devices have in place of a text that a selector compares. If some have the text it is not
// misspelt, and what comes next is what has the most memory; otherwise what is written alike.
func (h *helper) otherValues(ctx context.Context, a ask) {
	h.inSelectors(ctx, a, equality, mostValues, func(c comparison) []string {
		memory := map[string]int64{}
		for _, d := range h.s.devicesOf(ctx, *a.Class) {
			if value := textOf(d.Device, c.name); value != "" {
				size := amountOf(d.Device, fleet.CapacityMemory)
				memory[value] = max(memory[value], size.Value())
			}
		}
		values := sets.List(sets.KeySet(memory))
		if _, exists := memory[c.value]; !exists {
			return byDistance(c.value, values)
		}
		slices.SortStableFunc(values, func(a, b string) int { return cmp.Compare(memory[b], memory[a]) })
		return values
	})
}

// smallerAmounts are smaller ones in place of one that a selector compares.
func (h *helper) smallerAmounts(ctx context.Context, a ask) {
	h.inSelectors(ctx, a, quantity, 1, func(c comparison) (values []string) {
		asked, err := resource.ParseQuantity(c.value)
		if err != nil {
			return nil
		}
		var offered []resource.Quantity
		for _, d := range h.s.devicesOf(ctx, *a.Class) {
			offered = append(offered, roundDown(amountOf(d.Device, c.name)))
		}
		for _, amount := range smaller(offered, asked) {
			values = append(values, amount.String())
		}
		return values
	})
}

// roundDown makes a long amount readable.
func roundDown(q resource.Quantity) resource.Quantity {
	const gi = 1 << 30
	if q.Value() < gi {
		return q
	}
	return *resource.NewQuantity(q.Value()/gi*gi, resource.BinarySI)
}

// smaller returns different amounts below one, the largest first, no more than are tried.
func smaller(amounts []resource.Quantity, than resource.Quantity) []resource.Quantity {
	below := slices.DeleteFunc(amounts, func(q resource.Quantity) bool { return q.Cmp(than) >= 0 || q.Sign() <= 0 })
	slices.SortFunc(below, func(a, b resource.Quantity) int { return b.Cmp(a) })
	below = slices.CompactFunc(below, func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })
	return below[:min(len(below), mostTries)]
}

// capacities are less of a shared device, or what was meant where no device has such a capacity.
func (h *helper) capacities(ctx context.Context, a ask) {
	for _, name := range sortedNames(a.capacities()) {
		asked := a.capacities()[name]
		set := func(name resourceapi.QualifiedName, amount resource.Quantity) func(ask) {
			return func(a ask) { a.capacities()[name] = amount }
		}
		drop := func(a ask) { delete(a.capacities(), name) }
		amounts := h.offered(ctx, a, drop, name)
		if len(amounts) == 0 {
			capacities := sets.New[string]()
			for _, d := range h.s.devicesOf(ctx, *a.Class) {
				for name := range d.Device.Capacity {
					capacities.Insert(string(name))
				}
			}
			if near := nearest(string(name), sets.List(capacities)); near != "" {
				rename := func(a ask) {
					drop(a)
					set(resourceapi.QualifiedName(near), asked)(a)
				}
				h.confirm(ctx, a, RenameCapacity, rename, "with capacity %s in place of %s", near, name)
			}
			h.confirm(ctx, a, DropCapacity, drop, "without %s %s", name, asked.String())
		}
		for _, amount := range smaller(amounts, asked) {
			if h.confirm(ctx, a, LowerCapacity, set(name, amount), "with %s %s in place of %s", name, amount.String(), asked.String()) {
				break
			}
		}
	}
}

// offered returns the most that a claim can get of each device that would do otherwise.
func (h *helper) offered(ctx context.Context, a ask, drop func(ask), name resourceapi.QualifiedName) []resource.Quantity {
	var out []resource.Quantity
	j := newJudge(cmp.Or(h.empty, h.s.x.planner))
	for _, b := range asksOf(a.changed(drop)) {
		for _, n := range h.nodes {
			if b.Position != a.Position {
				continue
			}
			for _, f := range j.onNode(ctx, n, b) {
				c, has := f.Device.Capacity[name]
				if !has || f.cause() != "" && f.cause() != CapacityUsed {
					continue
				}
				left := j.left(&f, name)
				if c.RequestPolicy != nil && c.RequestPolicy.ValidRange != nil {
					left = fleet.Largest(c, left)
				}
				out = append(out, roundDown(left))
			}
		}
	}
	return out
}

// fewerDevices are the largest number of devices that could ever fit, and the largest that fits now.
func (h *helper) fewerDevices(ctx context.Context, a ask) {
	if *a.Mode != resourceapi.DeviceAllocationModeExactCount || *a.Count < 2 {
		return
	}
	set := func(n int) func(ask) { return func(a ask) { *a.Count = int64(n) } }
	confirmed := 0
	for _, p := range []*allocation.Planner{cmp.Or(h.empty, h.s.x.planner), h.s.x.planner} {
		most := sort.Search(int(min(*a.Count, resourceapi.AllocationResultsMaxSize+1))-1, func(n int) bool {
			_, fits := h.s.try(ctx, p, h.nodes, h.with(a.claim, a.changed(set(n+1))))
			return !fits
		})
		if most > 0 && most != confirmed && h.confirm(ctx, a, LowerCount, set(most), "with count %d in place of %d", most, *a.Count) {
			confirmed = most
		}
	}
}

// untolerated returns the taints of devices that would do without them, by their texts.
func (h *helper) untolerated(ctx context.Context, a ask) map[string]resourceapi.DeviceTaint {
	j, taints := newJudge(h.s.x.planner), map[string]resourceapi.DeviceTaint{}
	for _, n := range h.nodes {
		for _, f := range j.onNode(ctx, n, a) {
			if slices.Contains(f.causes, Tainted) || slices.Contains(f.causes, Withdrawn) {
				for _, taint := range untolerated(f.Device, *a.Tolerations) {
					taints[taintText(&taint)] = taint
				}
			}
		}
	}
	return taints
}

// tolerations tolerate the taints of devices that would do, each by itself, and all together. What the driver's own report is no advice to
// tolerate: preparing a device that is lost fails, and an administrator who cordons or withdraws one means it. To observe it is another matter.
func (h *helper) tolerations(ctx context.Context, a ask) {
	taints := h.untolerated(ctx, a)
	var texts []string
	kind, all := AddToleration, "with tolerations of the device taints %s"
	for _, text := range slices.Sorted(maps.Keys(taints)) {
		taint := taints[text]
		name, isOwn := strings.CutPrefix(taint.Key, h.s.x.model.Driver+"/")
		if strings.HasSuffix(taint.Key, "/"+string(device.ForeignClaim)) {
			// It is about a claim of another driver with the same name, and this driver refuses what tolerates it.
			h.confirm(ctx, a, EndForeignClaim, tolerate(taint), "when the pods of claim %s of another DRA driver have ended (device taint %s)", taint.Value, text)
			continue
		}
		if isWithdrawn(taint) && !a.Admin {
			// It goes only with the device.
			continue
		}
		texts = append(texts, text)
		one, format := AddToleration, "with a toleration of the device taint %s"
		if isOwn && !a.Admin && name != string(device.AdminAccess) {
			kind, all = EndTaint, "when the device taints %s are gone"
			one, format = kind, "when the device taint %s is gone"
			if name == string(device.Cordoned) {
				format = "when an administrator has uncordoned the GPU (device taint %s)"
			}
		}
		h.confirm(ctx, a, one, tolerate(taint), format, text)
	}
	if len(texts) > 1 {
		together := func(a ask) {
			for _, text := range texts {
				tolerate(taints[text])(a)
			}
		}
		h.confirm(ctx, a, kind, together, all, strings.Join(texts, " and "))
	}
}

func tolerate(taint resourceapi.DeviceTaint) func(ask) {
	return func(a ask) {
		*a.Tolerations = append(*a.Tolerations, resourceapi.DeviceToleration{Key: taint.Key, Operator: resourceapi.DeviceTolerationOpExists, Effect: taint.Effect})
	}
}
