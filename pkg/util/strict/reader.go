// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// maxFaults bounds a message. Nobody reads more of them at once.
const maxFaults = 32

// Reader takes values out of a parsed document and collects everything that is wrong
// with them. It works on nodes and not on Go structures, because only nodes still
// know what was repeated, what was empty and where it was.
type Reader struct {
	faults field.ErrorList
	// more is how many faults there were beyond maxFaults.
	more int
}

// Read reads the value at a path of the document.
type Read func(n *yaml.Node, at *field.Path)

// Into returns a Read that stores what a function reads.
func Into[T any](value *T, read func(n *yaml.Node, at *field.Path) T) Read {
	return func(n *yaml.Node, at *field.Path) { *value = read(n, at) }
}

// Skip reads nothing.
func Skip(*yaml.Node, *field.Path) {}

// Optional takes null for an absent value, as JSON does.
func Optional(read Read) Read {
	return func(n *yaml.Node, at *field.Path) {
		if !IsNull(n) {
			read(n, at)
		}
	}
}

// IsNull reports whether a value is null, or empty in YAML.
func IsNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// IsEmptyList reports whether a value is a list of nothing.
func IsEmptyList(n *yaml.Node) bool { return n.Kind == yaml.SequenceNode && len(n.Content) == 0 }

// Fault adds a fault.
func (r *Reader) Fault(fault *field.Error) {
	if len(r.faults) >= maxFaults {
		r.more++
		return
	}
	r.faults = append(r.faults, fault)
}

// Invalid adds a fault of a value.
func (r *Reader) Invalid(n *yaml.Node, at *field.Path, format string, args ...any) {
	r.Fault(field.Invalid(at, given(n), fmt.Sprintf(format, args...)))
}

// WrongType adds a fault of a value that should be something else.
func (r *Reader) WrongType(n *yaml.Node, at *field.Path, want string) {
	r.Invalid(n, at, "must be %s, is %s", want, describe(n))
}

// FaultCount returns how many faults there are until now.
func (r *Reader) FaultCount() int { return len(r.faults) + r.more }

// Faults returns the first faults.
func (r *Reader) Faults() field.ErrorList { return r.faults }

// Err returns nil if nothing is wrong.
func (r *Reader) Err() error {
	switch err := r.faults.ToAggregate(); {
	case err == nil:
		return nil
	case r.more > 0:
		return fmt.Errorf("%w, and %d more faults", err, r.more)
	default:
		return err
	}
}

// Object reads the fields of an object and returns which of them are there.
func (r *Reader) Object(n *yaml.Node, at *field.Path, fields map[string]Read) map[string]bool {
	return r.members(n, at.Child, at, func(key *yaml.Node) (Read, string) {
		read, known := fields[key.Value]
		if !known || key.Kind != yaml.ScalarNode {
			return nil, "unknown field, known here: " + strings.Join(slices.Sorted(maps.Keys(fields)), ", ")
		}
		return read, ""
	})
}

// TypeMeta reads the apiVersion and the kind of a document, and reports whether they are
// the version and one of the kinds. Of any other nothing is known that could be wrong.
func (r *Reader) TypeMeta(root *yaml.Node, at *field.Path, version string, kinds ...string) (kind string, ok bool) {
	if root.Kind != yaml.MappingNode {
		r.WrongType(root, at, "an object")
		return "", false
	}
	_, versionKnown := r.typeField(root, "apiVersion", []string{version})
	kind, kindKnown := r.typeField(root, "kind", kinds)
	return kind, versionKnown && kindKnown
}

func (r *Reader) typeField(root *yaml.Node, name string, known []string) (string, bool) {
	at := field.NewPath(name)
	for i := 0; i+1 < len(root.Content); i += 2 {
		if key := root.Content[i]; key.Kind == yaml.ScalarNode && key.Value == name {
			return OneOf(r, root.Content[i+1], at, known)
		}
	}
	want := fmt.Sprintf("must be one of %q", known)
	if len(known) == 1 {
		want = fmt.Sprintf("must be %q", known[0])
	}
	r.Fault(field.Required(at, want))
	return "", false
}

// Map reads the values of an object with any keys.
func (r *Reader) Map(n *yaml.Node, at *field.Path, read func(key string, n *yaml.Node, at *field.Path)) {
	child := func(name string, _ ...string) *field.Path { return at.Key(name) }
	r.members(n, child, at, func(key *yaml.Node) (Read, string) {
		if key.Kind != yaml.ScalarNode {
			return nil, "a key must be a string"
		}
		return func(n *yaml.Node, at *field.Path) { read(key.Value, n, at) }, ""
	})
}

// members reads each field once with what find returns for it, or adds a fault with
// the text that find returns.
func (r *Reader) members(n *yaml.Node, child func(string, ...string) *field.Path, at *field.Path, find func(key *yaml.Node) (Read, string)) map[string]bool {
	seen := map[string]bool{}
	if n.Kind != yaml.MappingNode {
		r.WrongType(n, at, "an object")
		return seen
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		read, wrong := find(key)
		path := child(fieldName(key))
		switch {
		case read == nil:
			r.Fault(field.Invalid(path, field.OmitValueType{}, wrong))
		case seen[key.Value]:
			r.Fault(field.Invalid(path, field.OmitValueType{}, "is given more than once"+inLine(key)))
		default:
			seen[key.Value] = true
			read(value, path)
		}
	}
	return seen
}

// List reads up to most values.
func (r *Reader) List(n *yaml.Node, at *field.Path, most int, read Read) {
	if n.Kind != yaml.SequenceNode {
		r.WrongType(n, at, "a list")
		return
	}
	if len(n.Content) > most {
		r.Fault(field.TooMany(at, len(n.Content), most))
		return
	}
	for i, item := range n.Content {
		read(item, at.Index(i))
	}
}

// String reads a string.
func (r *Reader) String(n *yaml.Node, at *field.Path) (string, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str" {
		r.WrongType(n, at, "a string")
		return "", false
	}
	return n.Value, true
}

// Pattern reads a string of a certain form.
func (r *Reader) Pattern(n *yaml.Node, at *field.Path, form *regexp.Regexp, want string) string {
	text, ok := r.String(n, at)
	if ok && !form.MatchString(text) {
		r.Invalid(n, at, "must be %s", want)
	}
	return text
}

// OneOf reads one of some strings.
func OneOf[T ~string](r *Reader, n *yaml.Node, at *field.Path, known []T) (T, bool) {
	text, ok := r.String(n, at)
	if !ok {
		return "", false
	}
	if !slices.Contains(known, T(text)) {
		// As a string it is quoted; values of other types are not.
		r.Fault(field.NotSupported(at, quote.Short(text), known))
		return "", false
	}
	return T(text), true
}

// Int reads a whole number.
func (r *Reader) Int(n *yaml.Node, at *field.Path) (int, bool) {
	value, ok := number(n)
	if !ok || value != math.Trunc(value) {
		r.WrongType(n, at, "a whole number")
		return 0, false
	}
	// What does not fit is beyond all bounds, in the same direction.
	return int(max(math.MinInt32, min(math.MaxInt32, value))), true
}

// IntBetween reads a whole number within bounds. note goes on from what is right.
func (r *Reader) IntBetween(n *yaml.Node, at *field.Path, least, most int, note string) int {
	value, ok := r.Int(n, at)
	if ok && (value < least || value > most) {
		r.Invalid(n, at, "must be between %d and %d%s", least, most, note)
		return 0
	}
	return value
}

// NumberBetween reads a number within bounds.
func (r *Reader) NumberBetween(n *yaml.Node, at *field.Path, least, most float64) float64 {
	value, ok := number(n)
	if !ok {
		r.WrongType(n, at, "a number")
		return 0
	}
	// Not the other way round: .nan is neither less nor greater.
	if !(value >= least && value <= most) {
		r.Invalid(n, at, "must be between %v and %v", least, most)
	}
	return value
}

// Bool reads true or false.
func (r *Reader) Bool(n *yaml.Node, at *field.Path) bool {
	var value bool
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" || n.Decode(&value) != nil {
		r.WrongType(n, at, "true or false")
	}
	return value
}

func number(n *yaml.Node) (float64, bool) {
	var value float64
	ok := n.Kind == yaml.ScalarNode && (n.ShortTag() == "!!int" || n.ShortTag() == "!!float") && n.Decode(&value) == nil
	return value, ok
}

// inLine names the line, unless it is the only one, as in most JSON.
func inLine(n *yaml.Node) string {
	if n.Line <= 1 {
		return ""
	}
	return fmt.Sprintf(", again in line %d", n.Line)
}
