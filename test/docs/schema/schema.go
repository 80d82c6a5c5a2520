// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package schema reads JSON schemas, in their order, and says in words what they allow. It
// knows what the schemas of this repository use.
package schema

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/test/docs/page"
)

// Schema is a schema, or a part of one.
type Schema struct {
	// Ref is the name of the definition that it refers to, or empty.
	Ref  string
	node *yaml.Node
	root *yaml.Node
}

// Load reads a file with a schema.
func Load(t *testing.T, path string) *Schema {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// JSON is YAML, whose nodes keep the order.
	document := &yaml.Node{}
	if err := yaml.Unmarshal(content, document); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	root := document.Content[0]
	return &Schema{node: root, root: root}
}

// value is what a keyword has here, or in the definition that is referred to.
func (s *Schema) value(keyword string) *yaml.Node {
	if s == nil {
		return nil
	}
	if n := entry(s.node, keyword); n != nil || s.Ref == "" {
		return n
	}
	return entry(entry(entry(s.root, "$defs"), s.Ref), keyword)
}

func (s *Schema) under(n *yaml.Node) *Schema {
	if n == nil {
		return nil
	}
	sub := &Schema{node: n, root: s.root}
	if ref := entry(n, "$ref"); ref != nil {
		sub.Ref = strings.TrimPrefix(ref.Value, "#/$defs/")
	}
	return sub
}

// Text is the value of a keyword, or empty.
func (s *Schema) Text(keyword string) string {
	if n := s.value(keyword); n != nil {
		return n.Value
	}
	return ""
}

// Default is the default value as it would be written on one line, or empty.
func (s *Schema) Default() string {
	n := s.value("default")
	if n == nil {
		return ""
	}
	return Flow(n)
}

// Items is the schema of the entries of a list, or nil.
func (s *Schema) Items() *Schema { return s.under(s.value("items")) }

// Values is the schema of the values of a map with any keys, or nil.
func (s *Schema) Values() *Schema {
	if n := s.value("additionalProperties"); n != nil && n.Kind == yaml.MappingNode {
		return s.under(n)
	}
	return nil
}

// Property is the schema of a property, or nil.
func (s *Schema) Property(name string) *Schema {
	properties := s.value("properties")
	if properties == nil {
		return nil
	}
	return s.under(entry(properties, name))
}

// Properties are the names of all properties, in order.
func (s *Schema) Properties() []string {
	var names []string
	if n := s.value("properties"); n != nil {
		for i := 0; i < len(n.Content); i += 2 {
			names = append(names, n.Content[i].Value)
		}
	}
	return names
}

// Requires reports whether a property must be there.
func (s *Schema) Requires(name string) bool {
	for _, n := range list(s.value("required")) {
		if n.Value == name {
			return true
		}
	}
	return false
}

// Type says what is allowed: the title, where there is one, or what follows from the keywords.
func (s *Schema) Type() string {
	if title := s.Text("title"); title != "" {
		return title
	}
	if n := s.value("const"); n != nil {
		return page.Code(n.Value)
	}
	if values := list(s.value("enum")); len(values) > 0 {
		var texts []string
		for _, n := range values {
			texts = append(texts, n.Value)
		}
		return page.Codes(texts)
	}
	var types []string
	for _, n := range append(list(s.value("type")), list(s.value("oneOf"))...) {
		if n.Kind == yaml.MappingNode {
			types = append(types, s.under(n).Type())
			continue
		}
		types = append(types, n.Value)
	}
	if len(types) != 1 {
		return strings.Join(types, " or ")
	}
	switch types[0] {
	case "array":
		if items := s.Items(); items != nil {
			return "list of " + plural(items.Type())
		}
		return "list"
	case "object":
		if values := s.Values(); values != nil {
			return "map of " + plural(values.Type())
		}
		return "object"
	}
	return types[0] + s.limits("minimum", "maximum", "") + s.limits("minLength", "maxLength", " characters")
}

// plural of what is no list of values.
func plural(kind string) string {
	if strings.HasPrefix(kind, "`") {
		return kind
	}
	return kind + "s"
}

// limits says between what a number, or a length, must be.
func (s *Schema) limits(least, most, unit string) string {
	low, high := s.Text(least), s.Text(most)
	switch {
	case low == "" && high == "", low == "1" && high == "" && unit != "":
		return ""
	case high == "":
		return fmt.Sprintf(", at least %s%s", low, unit)
	case low == "":
		return fmt.Sprintf(", at most %s%s", high, unit)
	}
	return fmt.Sprintf(", %s to %s%s", low, high, unit)
}

// Flow is a value on one line.
func Flow(n *yaml.Node) string {
	copied := *n
	flow(&copied)
	text, err := yaml.Marshal(&copied)
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

// flow makes a copy of the parts without style and comments.
func flow(n *yaml.Node) {
	n.Style &^= yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle
	if n.Kind != yaml.ScalarNode {
		n.Style = yaml.FlowStyle
	}
	n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	parts := make([]*yaml.Node, len(n.Content))
	for i, part := range n.Content {
		copied := *part
		flow(&copied)
		parts[i] = &copied
	}
	n.Content = parts
}

func entry(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// list is a list, or the one value that stands for one.
func list(n *yaml.Node) []*yaml.Node {
	switch {
	case n == nil:
		return nil
	case n.Kind == yaml.SequenceNode:
		return n.Content
	}
	return []*yaml.Node{n}
}
