// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	// mostValues is how many values are suggested in place of one, and mostTries how many amounts are tried.
	mostValues = 3
	mostTries  = 8
)

// change is one of a request that may help.
type change struct {
	kind SuggestionKind
	text string
	edit func(ask)
}

// choices are changes in place of each other, the best first. No more than most of them are suggested.
type choices struct {
	most int
	of   []change
}

// changes returns those of a request, the smallest first.
func (h *helper) changes(ctx context.Context, a ask) []choices {
	out := append(otherValues(ctx, h.s, a), smallerAmounts(ctx, h.s, a)...)
	out = append(out, h.capacities(ctx, a)...)
	return append(out, h.fewerDevices(ctx, a), withoutSelector(a), h.tolerations(ctx, a))
}

// selected calls f for each comparison that a form finds in the selectors of a request, with what is compared, the value, and a change
// of the value.
func selected(a ask, form *regexp.Regexp, f func(name, asked string, with func(value string) func(ask))) {
	for i, s := range *a.Selectors {
		if s.CEL == nil {
			continue
		}
		for _, at := range form.FindAllStringSubmatchIndex(s.CEL.Expression, -1) {
			text := func(group int) string { return s.CEL.Expression[max(0, at[2*group]):max(0, at[2*group+1])] }
			from, to := max(at[4], at[6]), max(at[5], at[7])
			f(text(1), text(2)+text(3), func(value string) func(ask) {
				whole := text(0)
				// What devices publish is not to be part of an expression.
				other := s.CEL.Expression[at[0]:from-1] + quote.CEL(value) + s.CEL.Expression[to+1:at[1]]
				expression := strings.ReplaceAll(s.CEL.Expression, whole, other)
				return func(a ask) { (*a.Selectors)[i].CEL = &resourceapi.CELDeviceSelector{Expression: expression} }
			})
		}
	}
}

// equality finds comparisons of an attribute with a text, such as .profile == '1g.10gb', and quantity those of an amount.
var (
	equality = regexp.MustCompile(`\.([A-Za-z_][A-Za-z0-9_]*)\s*==\s*(?:'([^'\\]*)'|"([^"\\]*)")`)
	quantity = regexp.MustCompile(`\.([a-zA-Z_][a-zA-Z0-9_]*)\.(?:compareTo|isGreaterThan)\(quantity\((?:'([^']*)'|"([^"]*)")\)\)`)
)

// otherValues are what devices have in place of a text that a selector compares.
func otherValues(ctx context.Context, s *sight, a ask) []choices {
	var out []choices
	selected(a, equality, func(name, asked string, with func(string) func(ask)) {
		c := choices{most: mostValues}
		for _, value := range replacements(ctx, s, a, name, asked) {
			if value != asked {
				c.of = append(c.of, change{ChangeValue, fmt.Sprintf("with %s %s in place of %s", name, value, asked), with(value)})
			}
		}
		out = append(out, c)
	})
	return out
}

// replacements returns what devices have in place of a text. If some have the text it is not
// misspelt, and what comes next is what has the most memory; otherwise what is written alike.
func replacements(ctx context.Context, s *sight, a ask, attribute, asked string) []string {
	memory := map[string]int64{}
	for _, d := range s.devicesOf(ctx, *a.Class) {
		if value := textOf(d, attribute); value != "" {
			size := amountOf(d, fleet.CapacityMemory)
			memory[value] = max(memory[value], size.Value())
		}
	}
	values := sets.List(sets.KeySet(memory))
	if _, exists := memory[asked]; !exists {
		return byDistance(asked, values)
	}
	slices.SortStableFunc(values, func(a, b string) int { return cmp.Compare(memory[b], memory[a]) })
	return values
}

func amountOf(d *resourceapi.Device, capacity string) resource.Quantity {
	for name, c := range d.Capacity {
		if unqualified(string(name)) == capacity {
			return c.Value
		}
	}
	return resource.Quantity{}
}

// smallerAmounts are smaller ones in place of one that a selector compares.
func smallerAmounts(ctx context.Context, s *sight, a ask) []choices {
	var out []choices
	selected(a, quantity, func(name, text string, with func(string) func(ask)) {
		asked, err := resource.ParseQuantity(text)
		if err != nil {
			return
		}
		var offered []resource.Quantity
		for _, d := range s.devicesOf(ctx, *a.Class) {
			offered = append(offered, roundDown(amountOf(d, name)))
		}
		c := choices{most: 1}
		for _, amount := range smaller(offered, asked) {
			c.of = append(c.of, change{ChangeValue, fmt.Sprintf("with %s %s in place of %s", name, amount.String(), asked.String()), with(amount.String())})
		}
		out = append(out, c)
	})
	return out
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
func (h *helper) capacities(ctx context.Context, a ask) []choices {
	if *a.Capacity == nil {
		return nil
	}
	var out []choices
	j := newJudge(cmp.Or(h.empty, h.s.x.planner))
	for _, name := range sortedNames((*a.Capacity).Requests) {
		asked := (*a.Capacity).Requests[name]
		drop := func(a ask) { delete((*a.Capacity).Requests, name) }
		var amounts []resource.Quantity
		for _, b := range asksOf(a.changed(drop)) {
			for _, n := range h.nodes {
				if b.Position == a.Position {
					amounts = append(amounts, offered(ctx, j, n, b, name)...)
				}
			}
		}
		c := choices{most: 1}
		if len(amounts) == 0 {
			c.most = 2
			if near := nearest(string(name), capacityNames(ctx, h.s, a)); near != "" {
				c.of = append(c.of, change{RenameCapacity, fmt.Sprintf("with capacity %s in place of %s", near, name), func(a ask) {
					drop(a)
					(*a.Capacity).Requests[resourceapi.QualifiedName(near)] = asked
				}})
			}
			c.of = append(c.of, change{DropCapacity, fmt.Sprintf("without %s %s", name, asked.String()), drop})
		}
		for _, amount := range smaller(amounts, asked) {
			c.of = append(c.of, change{LowerCapacity, fmt.Sprintf("with %s %s in place of %s", name, amount.String(), asked.String()), func(a ask) { (*a.Capacity).Requests[name] = amount }})
		}
		out = append(out, c)
	}
	return out
}

// offered returns the most that a claim can get of each device that would do otherwise.
func offered(ctx context.Context, j *judge, node *corev1.Node, a ask, name resourceapi.QualifiedName) []resource.Quantity {
	var out []resource.Quantity
	for _, f := range j.onNode(ctx, node, a) {
		c, has := f.device.Capacity[name]
		if !has || f.cause() != "" && f.cause() != CapacityUsed {
			continue
		}
		left := j.left(&f, name)
		if c.RequestPolicy != nil && c.RequestPolicy.ValidRange != nil {
			left = fleet.Largest(c, left)
		}
		out = append(out, roundDown(left))
	}
	return out
}

// capacityNames returns those of the devices of the class.
func capacityNames(ctx context.Context, s *sight, a ask) []string {
	names := sets.New[string]()
	for _, d := range s.devicesOf(ctx, *a.Class) {
		for name := range d.Capacity {
			names.Insert(string(name))
		}
	}
	return sets.List(names)
}

// fewerDevices is the largest number of devices that fits.
func (h *helper) fewerDevices(ctx context.Context, a ask) choices {
	if *a.Mode != resourceapi.DeviceAllocationModeExactCount || *a.Count < 2 {
		return choices{}
	}
	set := func(n int64) func(ask) { return func(a ask) { *a.Count = n } }
	low, high := int64(0), min(*a.Count, resourceapi.AllocationResultsMaxSize+1)
	for high-low > 1 {
		middle := (low + high) / 2
		if _, fits := try(ctx, h.s.x, h.s.x.planner, h.nodes, h.with(a.claim, a.changed(set(middle)))); fits {
			low = middle
		} else {
			high = middle
		}
	}
	if low == 0 {
		return choices{}
	}
	return choices{1, []change{{LowerCount, fmt.Sprintf("with count %d in place of %d", low, *a.Count), set(low)}}}
}

// withoutSelector does without one of several, or without the only one.
func withoutSelector(a ask) choices {
	var c choices
	for i, s := range *a.Selectors {
		if s.CEL != nil {
			c.of = append(c.of, change{DropSelector, fmt.Sprintf("without selector %d: %s", i, oneLine(s.CEL.Expression)), func(a ask) { *a.Selectors = slices.Delete(*a.Selectors, i, i+1) }})
		}
	}
	c.most = len(c.of)
	return c
}

// tolerations tolerate the taints of devices that would do, each by itself, and all together. What the driver's own report is no advice to
// tolerate: preparing a device that is lost fails, and an administrator who cordons or withdraws one means it. To observe it is another matter.
func (h *helper) tolerations(ctx context.Context, a ask) choices {
	j, taints := newJudge(h.s.x.planner), map[string]resourceapi.DeviceTaint{}
	for _, n := range h.nodes {
		for _, f := range j.onNode(ctx, n, a) {
			if slices.Contains(f.causes, Tainted) || slices.Contains(f.causes, Withdrawn) {
				for _, taint := range untolerated(f.device, *a.Tolerations) {
					taints[taintText(&taint)] = taint
				}
			}
		}
	}
	var c choices
	var texts []string
	kind, all := AddToleration, "with tolerations of the device taints %s"
	for _, text := range sets.List(sets.KeySet(taints)) {
		name, isOwn := strings.CutPrefix(taints[text].Key, h.s.x.model.Driver+"/")
		if taint := taints[text]; strings.HasSuffix(taint.Key, "/"+string(device.ForeignClaim)) {
			// It is about a claim of another driver with the same name, and this driver refuses what tolerates it.
			c.of = append(c.of, change{EndForeignClaim, "when the pods of claim " + taint.Value + " of another DRA driver have ended (device taint " + text + ")", tolerate(taint)})
			continue
		}
		texts = append(texts, text)
		one := change{AddToleration, "with a toleration of the device taint " + text, tolerate(taints[text])}
		if isOwn && !a.Admin && name != string(device.AdminAccess) {
			kind, all = EndTaint, "when the device taints %s are gone"
			one.kind, one.text = kind, "when the device taint "+text+" is gone"
			if name == string(device.Cordoned) {
				one.text = "when an administrator has uncordoned the GPU (device taint " + text + ")"
			}
		}
		c.of = append(c.of, one)
	}
	if len(texts) > 1 {
		c.of = append(c.of, change{kind, fmt.Sprintf(all, strings.Join(texts, " and ")), func(a ask) {
			for _, text := range texts {
				tolerate(taints[text])(a)
			}
		}})
	}
	c.most = len(c.of)
	return c
}

func tolerate(taint resourceapi.DeviceTaint) func(ask) {
	return func(a ask) {
		*a.Tolerations = append(*a.Tolerations, resourceapi.DeviceToleration{Key: taint.Key, Operator: resourceapi.DeviceTolerationOpExists, Effect: taint.Effect})
	}
}
