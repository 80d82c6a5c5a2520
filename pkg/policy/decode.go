// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxBytes is far more than a policy needs. It bounds the work.
const maxBytes = 256 * 1024

// Decode reads a SharingPolicy in YAML or JSON, strictly, and fills in what it
// leaves out. The error names every fault with its field, the value and what
// would be right. schema.json in this package says the same as far as a schema
// can.
func Decode(data []byte) (*Policy, error) {
	if len(data) > maxBytes {
		return nil, fmt.Errorf("invalid %s: is longer than %d bytes", PolicyKind, maxBytes)
	}
	root, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("invalid %s: %w", PolicyKind, err)
	}
	r := &reader{}
	p := r.policy(root)
	if err := r.err(); err != nil {
		return nil, fmt.Errorf("invalid %s: %w", PolicyKind, err)
	}
	return p, nil
}

// parse reads one document. Aliases stay aliases, so that a small file cannot
// become a large document.
func parse(data []byte) (root *yaml.Node, err error) {
	// The YAML library panics where it finds itself in a state that it believes
	// to be impossible. A file must not end the driver for all claims.
	defer func() {
		if p := recover(); p != nil {
			root, err = nil, fmt.Errorf("this YAML cannot be read: %v", p)
		}
	}()
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var document, next yaml.Node
	if err := decoder.Decode(&document); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, errors.New("is empty")
		}
		return nil, err
	}
	if err := decoder.Decode(&next); err == nil {
		return nil, fmt.Errorf("must be one YAML document, another one begins in line %d", next.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(document.Content) != 1 {
		return nil, errors.New("is empty")
	}
	return document.Content[0], nil
}

// policy reads the document.
func (r *reader) policy(root *yaml.Node) *Policy {
	if root.Kind != yaml.MappingNode {
		r.wrongType(root, field.NewPath("policy"), "an object")
		return nil
	}
	if r.typeMeta(root); len(r.faults) > 0 {
		// Of another kind or version nothing is known that could be wrong.
		return nil
	}
	p := Builtin()
	skip := func(*yaml.Node, *field.Path) {}
	r.object(root, nil, map[string]take{
		"apiVersion": skip,
		"kind":       skip,
		"rules":      into(&p.Rules, r.rules),
		"default":    into(&p.Default, r.offer),
	})
	return p
}

// typeMeta checks apiVersion and kind.
func (r *reader) typeMeta(root *yaml.Node) {
	for _, f := range []struct{ name, want string }{{"apiVersion", Version}, {"kind", PolicyKind}} {
		at, found := field.NewPath(f.name), false
		for i := 0; i+1 < len(root.Content); i += 2 {
			if root.Content[i].Kind == yaml.ScalarNode && root.Content[i].Value == f.name && !found {
				found = true
				oneOf(r, root.Content[i+1], at, []string{f.want})
			}
		}
		if !found {
			r.fault(field.Required(at, fmt.Sprintf("must be %q", f.want)))
		}
	}
}
