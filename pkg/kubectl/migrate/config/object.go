// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/util/strict"
)

// reader reads configurations of programs that ignore fields which they do not know.
type reader struct {
	strict.Reader
	found *finding.List
	// prefix leads to the document.
	prefix string
	// plain makes one of the names that a field may have.
	plain func(key string) string
	// isUnset reports that nobody has set a field which is there, unless it is nil.
	isUnset func(n *yaml.Node) bool
}

func (r *reader) path(at *field.Path) string { return r.prefix + at.String() }

// object reads the fields of an object. Fields that are null are not there, and unknown fields are told.
func (r *reader) object(n *yaml.Node, at *field.Path, fields map[string]strict.Read, unknown func(path, value string)) map[string]bool {
	seen, names := map[string]bool{}, map[string]string{}
	for name := range fields {
		names[r.plain(name)] = name
	}
	r.Map(n, at, func(key string, n *yaml.Node, _ *field.Path) {
		path := field.NewPath(key)
		if at != nil {
			path = at.Child(key)
		}
		name := names[r.plain(key)]
		switch read := fields[name]; {
		case r.isUnset != nil && r.isUnset(n):
		case read == nil:
			unknown(r.path(path), text(n))
		case seen[name]:
			r.Fault(field.Duplicate(path, key))
		case !strict.IsNull(n):
			seen[name] = true
			read(n, path)
		}
	})
	return seen
}

// require refuses an object without some fields.
func (r *reader) require(n *yaml.Node, at *field.Path, seen map[string]bool, why string, names ...string) {
	for _, name := range names {
		if n.Kind == yaml.MappingNode && !seen[name] {
			r.Fault(field.Required(at.Child(name), why))
		}
	}
}

// loses reports unknown fields as not translated.
func (r *reader) loses(why string) func(path, value string) {
	return func(path, value string) { r.found.Lost(path, value, why) }
}

// text returns a value in one line.
func text(n *yaml.Node) string {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value
	case yaml.SequenceNode:
		items := make([]string, 0, len(n.Content))
		for _, item := range n.Content[:min(len(n.Content), maxShown)] {
			items = append(items, text(item))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case yaml.MappingNode:
		var items []string
		for key, value := range document.Fields(n) {
			if len(items) < maxShown {
				items = append(items, key.Value+": "+text(value))
			}
		}
		return "{" + strings.Join(items, ", ") + "}"
	case yaml.AliasNode:
		return "*" + n.Value
	case yaml.DocumentNode:
	}
	return ""
}

// maxShown is how many items of a list or an object are shown in a line.
const maxShown = 8
