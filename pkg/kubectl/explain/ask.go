// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// ask is one of a claim.
type ask struct {
	claim *resourceapi.ResourceClaim
	fleet.Ask
}

func asksOf(c *resourceapi.ResourceClaim) []ask {
	var out []ask
	for _, a := range fleet.AsksOf(&c.Spec.Devices) {
		out = append(out, ask{c, a})
	}
	return out
}

// invalid says what the API server refuses in a claim that it has not got yet. It is not all that the
// API server looks at, but all that the allocator takes for granted.
func invalid(c *resourceapi.ResourceClaim) []string {
	var out []string
	requests := c.Spec.Devices.Requests
	if len(requests) > resourceapi.DeviceRequestsMaxSize {
		out = append(out, fmt.Sprintf("spec.devices.requests has %d entries, at most %d are allowed", len(requests), resourceapi.DeviceRequestsMaxSize))
	}
	for i := range requests {
		r := &requests[i]
		switch n := len(r.FirstAvailable); {
		case (r.Exactly == nil) == (n == 0):
			out = append(out, fmt.Sprintf("request %s has to have either exactly or firstAvailable", r.Name))
		case n > resourceapi.FirstAvailableDeviceRequestMaxSize:
			out = append(out, fmt.Sprintf("request %s has %d alternatives in firstAvailable, at most %d are allowed", r.Name, n, resourceapi.FirstAvailableDeviceRequestMaxSize))
		}
	}
	for _, a := range asksOf(c) {
		switch {
		case *a.Mode != resourceapi.DeviceAllocationModeExactCount && *a.Mode != resourceapi.DeviceAllocationModeAll:
			out = append(out, fmt.Sprintf("allocationMode %s of request %s has to be ExactCount or All", *a.Mode, a.Name))
		case *a.Mode == resourceapi.DeviceAllocationModeExactCount && *a.Count < 1:
			out = append(out, fmt.Sprintf("count %d of request %s has to be 1 or more", *a.Count, a.Name))
		}
	}
	return out
}

// changed returns a copy of the claim in which the ask is different.
func (a ask) changed(change func(ask)) *resourceapi.ResourceClaim {
	c := a.claim.DeepCopy()
	for _, b := range asksOf(c) {
		if b.Position == a.Position {
			change(b)
		}
	}
	return c
}

// complete sets what the API server sets where a claim leaves it out.
func complete(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c = c.DeepCopy()
	for _, a := range asksOf(c) {
		if *a.Mode == "" {
			*a.Mode = resourceapi.DeviceAllocationModeExactCount
		}
		if *a.Mode == resourceapi.DeviceAllocationModeExactCount && *a.Count == 0 {
			*a.Count = 1
		}
		for i, t := range *a.Tolerations {
			if t.Operator == "" {
				(*a.Tolerations)[i].Operator = resourceapi.DeviceTolerationOpEqual
			}
		}
	}
	return c
}

// wants says how many devices are wanted, for people.
func (a ask) wants() string {
	switch {
	case *a.Mode == resourceapi.DeviceAllocationModeAll:
		return "all devices"
	case *a.Count == 1:
		return "1 device"
	default:
		return fmt.Sprintf("%d devices", *a.Count)
	}
}

// unmet says of every constraint which values of its attribute free devices have, on the node that
// has most of them.
func unmet(ctx context.Context, s *sight, j *judge) []string {
	var out []string
	for _, c := range s.claims {
		for i := range c.Spec.Devices.Constraints {
			constraint := &c.Spec.Devices.Constraints[i]
			if constraintName(constraint) == "" {
				continue
			}
			out = append(out, compared(ctx, s, j, c, constraint))
		}
	}
	return out
}

// compared says what one constraint compares.
func compared(ctx context.Context, s *sight, j *judge, c *resourceapi.ResourceClaim, constraint *resourceapi.DeviceConstraint) string {
	most, node, shown := -1, "", []string(nil)
	for _, kind := range s.eligible() {
		total := 0
		var of []string
		for _, a := range asksOf(c) {
			if !constrains(constraint, a) {
				continue
			}
			values := map[string]int{}
			for _, f := range j.onNode(ctx, kind[0], a) {
				if attribute, has := f.Attribute(constraintName(constraint)); has && f.cause() == "" {
					values[attributeText(attribute)]++
					total++
				}
			}
			of = append(of, fmt.Sprintf("for request %s (%s) %s", a.Name, a.wants(), valuesText(values)))
		}
		if total > most {
			most, node, shown = total, kind[0].Name, of
		}
	}
	relation := "the same"
	if constraint.DistinctAttribute != nil {
		relation = "a different"
	}
	return fmt.Sprintf("claim %s wants devices with %s %s. Free on node %s: %s",
		c.Name, relation, constraintName(constraint), node, strings.Join(shown, "; "))
}

// valuesText says how many devices have which values.
func valuesText(values map[string]int) string {
	const shown = 4
	var out []string
	all := often(values)
	for _, v := range all[:min(len(all), shown)] {
		out = append(out, fmt.Sprintf("%d with %s", values[v], v))
	}
	if more := len(all) - shown; more > 0 {
		out = append(out, fmt.Sprintf("others with %d more %s", more, plural(more, "value", "values")))
	}
	return cmp.Or(strings.Join(out, ", "), "none")
}

// attributeText is the value of an attribute.
func attributeText(a resourceapi.DeviceAttribute) string {
	switch {
	case a.StringValue != nil:
		return strconv.Quote(*a.StringValue)
	case a.VersionValue != nil:
		return *a.VersionValue
	case a.IntValue != nil:
		return strconv.FormatInt(*a.IntValue, 10)
	case a.BoolValue != nil:
		return strconv.FormatBool(*a.BoolValue)
	}
	return fmt.Sprint("one of ", a.StringValues, a.VersionValues, a.IntValues, a.BoolValues)
}
