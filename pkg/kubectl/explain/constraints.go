// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

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
			values := j.values(ctx, kind[0], a, constraintName(constraint))
			for _, v := range values {
				total += v.devices
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

// value is how many free devices have a value of an attribute.
type value struct {
	text    string
	devices int
}

// values counts the values of an attribute of the free devices of a node, the most frequent first.
func (j *judge) values(ctx context.Context, node *corev1.Node, a ask, name string) []value {
	var found []value
	for _, f := range j.onNode(ctx, node, a) {
		attribute, has := f.Attribute(name)
		if f.cause() != "" || !has {
			continue
		}
		text := attributeText(attribute)
		i := slices.IndexFunc(found, func(v value) bool { return v.text == text })
		if i < 0 {
			i, found = len(found), append(found, value{text: text})
		}
		found[i].devices++
	}
	slices.SortStableFunc(found, func(a, b value) int {
		return cmp.Or(cmp.Compare(b.devices, a.devices), cmp.Compare(a.text, b.text))
	})
	return found
}

func valuesText(values []value) string {
	const shown = 4
	var out []string
	for _, v := range values[:min(len(values), shown)] {
		out = append(out, fmt.Sprintf("%d with %s", v.devices, v.text))
	}
	if more := len(values) - shown; more > 0 {
		out = append(out, fmt.Sprintf("others with %d more %s", more, plural(more, "value", "values")))
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
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
