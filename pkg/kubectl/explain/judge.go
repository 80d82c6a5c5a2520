// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// judge looks at single devices the way the allocator does.
type judge struct {
	planner *allocation.Planner
	matcher *allocation.Matcher
	// free are the counters that nobody uses, by pool and set.
	free map[poolName]map[string]map[string]resourceapi.Counter
}

// errNoCEL is what is wrong with a selector of another type than this program knows.
var errNoCEL = errors.New("it has no CEL expression")

type poolName struct{ driver, pool string }

// finding is why a device does not do for a request.
type finding struct {
	pool   *allocation.Pool
	device *resourceapi.Device
	// causes are all that apply, the most lasting first. Without any the device would do.
	causes []Cause
	// detail says what of the first cause people want to know: the selector, the taint.
	detail string
	// most is what the device has of a capacity of which too much is wanted.
	most resource.Quantity
	// err is that of a selector.
	err error
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
	return &judge{planner: p, matcher: allocation.NewMatcher(p.Cluster), free: map[poolName]map[string]map[string]resourceapi.Counter{}}
}

// onNode judges all devices of a node.
func (j *judge) onNode(ctx context.Context, node *corev1.Node, a ask) []finding {
	var out []finding
	for d := range j.planner.Cluster.Devices(node) {
		out = append(out, j.device(ctx, d, a))
	}
	return out
}

// device judges one. What is not selected is of no interest, whatever else applies to it.
func (j *judge) device(ctx context.Context, p allocation.Published, a ask) finding {
	f, pool := finding{pool: p.Pool, device: p.Device()}, p.Pool
	switch {
	case pool.Incomplete():
		f.add(PoolIncomplete, "%d of %d slices of pool %s are there: the driver is just writing them, or stopped in between", len(pool.Slices), pool.Expected, pool.Name)
		return f
	case pool.Invalid:
		f.add(PoolInvalid, "pool %s has a name twice, or a counter that does not exist", pool.Name)
		return f
	}
	if j.selected(ctx, &f, p, a); len(f.causes) > 0 {
		return f
	}
	j.capacity(&f, a)
	if d := f.device; !a.Admin && j.planner.HeldAlone(pool.Driver, pool.Name, d.Name) {
		f.add(Held, "%s", d.Name)
	} else {
		j.counters(&f)
	}
	for _, t := range untolerated(f.device, *a.Tolerations) {
		if strings.HasSuffix(t.Key, "/"+string(device.Withdrawn)) {
			f.add(Withdrawn, "%s", withdrawnText(f.device, &t))
		} else {
			f.add(Tainted, "%s", taintText(&t))
		}
	}
	for _, c := range a.claim.Spec.Devices.Constraints {
		if name := constraintName(&c); name != "" && constrains(&c, a) {
			if _, has := allocation.Attribute(f.device, pool.Driver, name); !has {
				f.add(Unconstrained, "%s", name)
			}
		}
	}
	return f
}

// selected adds why the class or the request does not select a device.
func (j *judge) selected(ctx context.Context, f *finding, p allocation.Published, a ask) {
	class := j.planner.Cluster.Class(*a.Class)
	if class == nil {
		f.add(ClassMissing, "%s", *a.Class)
		return
	}
	for _, of := range []struct {
		selectors []resourceapi.DeviceSelector
		cause     Cause
		where     string
	}{{class.Spec.Selectors, NotOfClass, "class " + class.Name}, {*a.Selectors, NotSelected, "request " + a.Name}} {
		for n, selector := range of.selectors {
			if selector.CEL == nil {
				f.err = errNoCEL
				f.add(ExpressionError, "selector %d of %s", n, of.where)
				return
			}
			matches, err := j.matcher.Matches(ctx, selector.CEL.Expression, p)
			if err != nil {
				f.err = cel.EnhanceRuntimeError(err)
				f.add(ExpressionError, "selector %d of %s", n, of.where)
				return
			}
			if !matches {
				f.add(of.cause, "%d", n)
				return
			}
		}
	}
}

// counters adds that others have parts of the GPU that the device needs. A device that is
// shared has taken its counters with its first share.
func (j *judge) counters(f *finding) {
	driver, pool, d := f.pool.Driver, f.pool.Name, f.device
	if len(d.ConsumesCounters) == 0 || len(j.planner.Shares(driver, pool, d.Name)) > 0 {
		return
	}
	free := j.countersOf(f.pool)
	for _, consumed := range d.ConsumesCounters {
		for name, c := range consumed.Counters {
			left := free[consumed.CounterSet][name]
			if left.Value.Cmp(c.Value) < 0 {
				f.add(CountersUsed, "%s", consumed.CounterSet)
				return
			}
		}
	}
}

func (j *judge) countersOf(p *allocation.Pool) map[string]map[string]resourceapi.Counter {
	key := poolName{p.Driver, p.Name}
	if known, has := j.free[key]; has {
		return known
	}
	free := map[string]map[string]resourceapi.Counter{}
	for _, s := range p.Slices {
		for _, set := range s.Spec.SharedCounters {
			free[set.Name] = map[string]resourceapi.Counter{}
			for name, c := range set.Counters {
				free[set.Name][name] = resourceapi.Counter{Value: c.Value.DeepCopy()}
			}
		}
	}
	for _, s := range p.Slices {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			if !j.planner.HeldAlone(p.Driver, p.Name, d.Name) && len(j.planner.Shares(p.Driver, p.Name, d.Name)) == 0 {
				continue
			}
			for _, consumed := range d.ConsumesCounters {
				for name, c := range consumed.Counters {
					left := free[consumed.CounterSet][name]
					left.Value.Sub(c.Value)
					free[consumed.CounterSet][name] = left
				}
			}
		}
	}
	j.free[key] = free
	return free
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

func constraintName(c *resourceapi.DeviceConstraint) string {
	switch {
	case c.MatchAttribute != nil:
		return string(*c.MatchAttribute)
	case c.DistinctAttribute != nil:
		return string(*c.DistinctAttribute)
	}
	return ""
}

// constrains reports whether a constraint is about a request.
func constrains(c *resourceapi.DeviceConstraint, a ask) bool {
	names := sets.New(c.Requests...)
	return len(names) == 0 || names.Has(a.Name) || names.Has(a.claim.Spec.Devices.Requests[a.Position[0]].Name)
}
