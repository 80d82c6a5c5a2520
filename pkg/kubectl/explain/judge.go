// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// judge looks at single devices the way the allocator does.
type judge struct {
	planner *allocation.Planner
	// free are the counters that nobody uses.
	free map[*allocation.Pool]fleet.Counters
}

// finding is why a device does not do for a request.
type finding struct {
	allocation.Published
	// causes are all that apply, the most lasting first. Without any the device would do.
	causes []Cause
	// detail says what of the first cause people want to know: the taint, or which of the selectors.
	detail string
	// most is what the device has of a capacity of which too much is wanted.
	most resource.Quantity
}

// cause returns the first cause, or "".
func (f *finding) cause() Cause {
	if len(f.causes) == 0 {
		return ""
	}
	return f.causes[0]
}

func (f *finding) add(c Cause, format string, a ...any) {
	if len(f.causes) == 0 {
		f.detail = fmt.Sprintf(format, a...)
	}
	f.causes = append(f.causes, c)
}

func newJudge(p *allocation.Planner) *judge {
	return &judge{p, map[*allocation.Pool]fleet.Counters{}}
}

// onNode judges all devices of a node.
func (j *judge) onNode(ctx context.Context, node *corev1.Node, a ask) []finding {
	var out []finding
	for d := range j.planner.Cluster.Devices(node) {
		out = append(out, j.device(ctx, d, a))
	}
	return out
}

// holders notes what claims have of a device, or of others that take the same counters.
func (j *judge) holders(f *finding, a ask) {
	held := j.planner.Held(f.Pool, f.Device.Name)
	switch alone := slices.ContainsFunc(held, (*fleet.Holding).Alone); {
	case alone && !a.Admin:
		f.add(Held, "%s", f.Device.Name)
	case (alone || len(held) == 0) && !j.countersOf(f.Pool).Fit(f.Device):
		// A device that is shared has taken its counters with its first share.
		f.add(CountersUsed, "%s", f.Device.Name)
	}
}

// device judges one. What is not selected is of no interest, whatever else applies to it.
func (j *judge) device(ctx context.Context, d allocation.Published, a ask) finding {
	f := finding{Published: d}
	switch {
	case d.Incomplete():
		f.add(PoolIncomplete, "%d of %d slices of pool %s are there: the driver is just writing them, or stopped in between", len(d.Slices), d.Expected(), d.Name)
		return f
	case d.Invalid:
		f.add(PoolInvalid, "pool %s has a name twice, or a counter that does not exist", d.Name)
		return f
	}
	if f = newFinding(ctx, j.planner.Cluster, d, *a.Class, *a.Selectors); len(f.causes) > 0 {
		return f
	}
	taints := untolerated(d.Device, *a.Tolerations)
	// What the policy has withdrawn comes back for nobody, even when those who have it end.
	for _, t := range taints {
		if isWithdrawn(t) {
			f.add(Withdrawn, "%s", withdrawnText(d.Device, &t))
		}
	}
	j.capacity(&f, a)
	j.holders(&f, a)
	var texts []string
	for _, t := range taints {
		if !isWithdrawn(t) {
			texts = append(texts, taintText(&t))
		}
	}
	if len(texts) > 0 {
		f.add(Tainted, "%s", strings.Join(texts, " and "))
	}
	for _, c := range a.claim.Spec.Devices.Constraints {
		if name := fleet.Compared(&c); name != "" && constrains(&c, a) {
			if _, has := d.Attribute(name); !has {
				f.add(Unconstrained, "%s", name)
			}
		}
	}
	return f
}

// newFinding says whether a class and the selectors of a request select a device.
func newFinding(ctx context.Context, c *allocation.Cluster, d allocation.Published, name string, selectors []resourceapi.DeviceSelector) finding {
	f, class := finding{Published: d}, c.Class(name)
	if class == nil {
		f.add(ClassMissing, "%s", name)
		return f
	}
	for n, s := range slices.Concat(class.Spec.Selectors, selectors) {
		of, cause := n-len(class.Spec.Selectors), NotSelected
		if of < 0 {
			cause = NotOfClass
		}
		if matches, err := c.Selects(ctx, ptr.Deref(s.CEL, resourceapi.CELDeviceSelector{}).Expression, d); err != nil {
			cause = ExpressionError
		} else if matches {
			continue
		}
		f.add(cause, "%d", of)
		break
	}
	return f
}

// capacity adds why a device has not enough of what a request asks for. What it never has comes before what it has no more.
func (j *judge) capacity(f *finding, a ask) {
	wanted := a.capacities()
	for _, name := range sortedNames(wanted) {
		if _, has := f.Device.Capacity[name]; !has {
			f.add(CapacityUnknown, "%s", name)
			return
		}
	}
	var used []resourceapi.QualifiedName
	for _, name := range sortedNames(f.Device.Capacity) {
		c := f.Device.Capacity[name]
		var asked *resource.Quantity
		if q, has := wanted[name]; has {
			asked = &q
		}
		amount, problem := fleet.Granted(asked, &c)
		if problem == "" && amount.Cmp(c.Value) > 0 {
			problem = "no device has more than " + amountText(name, c.Value)
		}
		if problem != "" {
			f.most = c.Value
			f.add(CapacityTooLarge, "%s %s is too much: %s", name, asked.String(), problem)
			return
		}
		// What a device that is not shared offers is there or not.
		if left := j.left(f, name); left.Cmp(amount) < 0 && ptr.Deref(f.Device.AllowMultipleAllocations, false) {
			used = append(used, name)
		}
	}
	for _, name := range used {
		f.add(CapacityUsed, "%s", name)
	}
}

// amountText writes memory as people say it.
func amountText(name resourceapi.QualifiedName, q resource.Quantity) string {
	if fleet.Unqualified(string(name)) == fleet.CapacityMemory {
		return printer.Bytes(q.Value())
	}
	return q.String()
}

// left returns how much of a capacity nobody has.
func (j *judge) left(f *finding, name resourceapi.QualifiedName) resource.Quantity {
	left := f.Device.Capacity[name].Value.DeepCopy()
	for _, h := range j.planner.Held(f.Pool, f.Device.Name) {
		left.Sub(h.Result.ConsumedCapacity[name])
	}
	return left
}

func sortedNames[V any](m map[resourceapi.QualifiedName]V) []resourceapi.QualifiedName {
	return sets.List(sets.KeySet(m))
}

// countersOf returns the counters of a pool that nobody uses.
func (j *judge) countersOf(p *allocation.Pool) fleet.Counters {
	if j.free[p] == nil {
		j.free[p] = fleet.CountersOf(p.Slices)
		for _, s := range p.Slices {
			for i := range s.Spec.Devices {
				if d := &s.Spec.Devices[i]; len(j.planner.Held(p, d.Name)) > 0 {
					j.free[p].Add(d, -1)
				}
			}
		}
	}
	return j.free[p]
}

// untolerated returns the taints that keep a device from a request.
func untolerated(d *resourceapi.Device, tolerations []resourceapi.DeviceToleration) []resourceapi.DeviceTaint {
	var out []resourceapi.DeviceTaint
	for _, t := range d.Taints {
		if t.Effect != resourceapi.DeviceTaintEffectNoSchedule && t.Effect != resourceapi.DeviceTaintEffectNoExecute {
			continue
		}
		if !slices.ContainsFunc(tolerations, func(o resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(o, t) }) {
			out = append(out, t)
		}
	}
	return out
}

// kindsOffered are the types of devices in the words of the sharing policy.
var kindsOffered = map[string]string{
	fleet.TypeGPU: "whole GPUs", fleet.TypeMIG: "MIG partitions", fleet.TypeMPS: "MPS shares", fleet.TypeTimeSlice: "time slices",
}

// isWithdrawn reports whether a taint is that of a device that the sharing policy does not offer any more.
func isWithdrawn(t resourceapi.DeviceTaint) bool {
	return strings.HasSuffix(t.Key, "/"+string(device.Withdrawn))
}

// withdrawnText says what the sharing policy does not offer any more, and since when.
func withdrawnText(d *resourceapi.Device, t *resourceapi.DeviceTaint) string {
	text := "the administrator's sharing policy does not offer " + cmp.Or(kindsOffered[textOf(d, "type")], "them") + " any more"
	if t.TimeAdded != nil {
		text += ", since " + t.TimeAdded.UTC().Format("2006-01-02 15:04Z")
	}
	return text
}

func taintText(t *resourceapi.DeviceTaint) string {
	if t.Value == "" {
		return fmt.Sprintf("%s:%s", t.Key, t.Effect)
	}
	return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
}

// constrains reports whether a constraint is about a request.
func constrains(c *resourceapi.DeviceConstraint, a ask) bool {
	names := sets.New(c.Requests...)
	return len(names) == 0 || names.Has(a.Name) || names.Has(a.claim.Spec.Devices.Requests[a.Position[0]].Name)
}
