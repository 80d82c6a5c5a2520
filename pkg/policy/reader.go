// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxFaults bounds a message. Nobody reads more of them at once.
const maxFaults = 32

// reader takes values out of a parsed document and collects everything that is
// wrong with them. It works on nodes and not on Go structures, because only
// nodes still know what was repeated, what was empty and where it was.
type reader struct {
	faults field.ErrorList
	// more is how many faults there were beyond maxFaults.
	more int
}

// A take reads the value at a place of the document.
type take func(n *yaml.Node, at *field.Path)

func into[T any](value *T, read func(n *yaml.Node, at *field.Path) T) take {
	return func(n *yaml.Node, at *field.Path) { *value = read(n, at) }
}

func (r *reader) fault(fault *field.Error) {
	if len(r.faults) >= maxFaults {
		r.more++
		return
	}
	r.faults = append(r.faults, fault)
}

// invalid is a fault of a value that is a scalar.
func (r *reader) invalid(n *yaml.Node, at *field.Path, format string, args ...any) {
	r.fault(field.Invalid(at, given(n), fmt.Sprintf(format, args...)))
}

// found is how many faults there are until now.
func (r *reader) found() int { return len(r.faults) + r.more }

// err is nil when nothing is wrong.
func (r *reader) err() error {
	switch err := r.faults.ToAggregate(); {
	case err == nil:
		return nil
	case r.more > 0:
		return fmt.Errorf("%w, and %d more faults", err, r.more)
	default:
		return err
	}
}

// object reads the fields of an object and tells which of them are there.
func (r *reader) object(n *yaml.Node, at *field.Path, fields map[string]take) map[string]bool {
	seen := map[string]bool{}
	if n.Kind != yaml.MappingNode {
		r.wrongType(n, at, "an object")
		return seen
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		read, known := fields[key.Value]
		path := at.Child(fieldName(key))
		switch {
		case !known || key.Kind != yaml.ScalarNode:
			r.fault(field.Invalid(path, field.OmitValueType{},
				"unknown field, known here: "+strings.Join(slices.Sorted(maps.Keys(fields)), ", ")))
		case seen[key.Value]:
			r.fault(field.Invalid(path, field.OmitValueType{}, fmt.Sprintf("is given more than once, again in line %d", key.Line)))
		default:
			seen[key.Value] = true
			read(value, path)
		}
	}
	return seen
}

func isEmptyList(n *yaml.Node) bool { return n.Kind == yaml.SequenceNode && len(n.Content) == 0 }

// list reads up to most values.
func (r *reader) list(n *yaml.Node, at *field.Path, most int, read take) {
	if n.Kind != yaml.SequenceNode {
		r.wrongType(n, at, "a list")
		return
	}
	if len(n.Content) > most {
		r.fault(field.TooMany(at, len(n.Content), most))
		return
	}
	for i, item := range n.Content {
		read(item, at.Index(i))
	}
}

// text reads a string.
func (r *reader) text(n *yaml.Node, at *field.Path) (string, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str" {
		r.wrongType(n, at, "a string")
		return "", false
	}
	return n.Value, true
}

// pattern reads a string of a certain form.
func (r *reader) pattern(n *yaml.Node, at *field.Path, form *regexp.Regexp, want string) string {
	text, ok := r.text(n, at)
	if ok && !form.MatchString(text) {
		r.invalid(n, at, "must be %s", want)
	}
	return text
}

// oneOf reads one of some strings.
func oneOf[T ~string](r *reader, n *yaml.Node, at *field.Path, known []T) (T, bool) {
	text, ok := r.text(n, at)
	if !ok {
		return "", false
	}
	if !slices.Contains(known, T(text)) {
		r.fault(field.NotSupported(at, T(short(text)), known))
		return "", false
	}
	return T(text), true
}

// whole reads a whole number within bounds. note goes on from what is right.
func (r *reader) whole(n *yaml.Node, at *field.Path, least, most int, note string) int {
	value, ok := number(n)
	if !ok || value != math.Trunc(value) {
		r.wrongType(n, at, "a whole number")
		return 0
	}
	if value < float64(least) || value > float64(most) {
		r.invalid(n, at, "must be between %d and %d%s", least, most, note)
		return 0
	}
	return int(value)
}

// factor reads a number within bounds.
func (r *reader) factor(n *yaml.Node, at *field.Path, least, most float64) float64 {
	value, ok := number(n)
	if !ok {
		r.wrongType(n, at, "a number")
		return 0
	}
	// Not the other way round: .nan is neither less nor greater.
	if !(value >= least && value <= most) {
		r.invalid(n, at, "must be between %v and %v", least, most)
	}
	return value
}

func number(n *yaml.Node) (float64, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" && n.ShortTag() != "!!float" {
		return 0, false
	}
	var value float64
	if err := n.Decode(&value); err != nil {
		return 0, false
	}
	return value, true
}

func (r *reader) wrongType(n *yaml.Node, at *field.Path, want string) {
	r.invalid(n, at, "must be %s, is %s", want, describe(n))
}

// describe names what a value is as a writer of YAML thinks of it.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias (*), which a sharing policy cannot have"
	}
	switch n.ShortTag() {
	case "!!str":
		return "a string"
	case "!!int":
		return "a whole number"
	case "!!float":
		return "a number"
	case "!!bool":
		return "true or false"
	case "!!null":
		return "empty; leave the field out"
	case "!!timestamp":
		return "a date without quotes"
	}
	return "of type " + short(n.ShortTag())
}

// given is a value for a message.
func given(n *yaml.Node) any {
	if n.Kind != yaml.ScalarNode || n.ShortTag() == "!!null" {
		return field.OmitValueType{}
	}
	if value, ok := number(n); ok && value == math.Trunc(value) && math.Abs(value) < 1<<53 {
		return int64(value)
	} else if ok {
		return value
	}
	return short(n.Value)
}

// plainName is a field's name that needs no quotes in a message.
var plainName = regexp.MustCompile(`^[0-9A-Za-z_-]{1,64}$`)

func fieldName(key *yaml.Node) string {
	if key.Kind == yaml.ScalarNode && plainName.MatchString(key.Value) {
		return key.Value
	}
	return strconv.Quote(short(key.Value))
}

// short cuts off what would make a message unreadable.
func short(text string) string {
	const most = 80
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
