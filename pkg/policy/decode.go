// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/strict"
)

// maxBytes bounds the work. It is far more than a policy needs.
const maxBytes = 256 * 1024

// Decode reads a SharingPolicy in YAML or JSON strictly and fills in defaults. The
// error names every fault with its field, the value and what is expected. schema.json
// in this package has the same rules, as far as a schema can express them.
func Decode(data []byte) (*Policy, error) {
	if len(data) > maxBytes {
		return nil, fmt.Errorf("invalid %s: is longer than %d bytes", PolicyKind, maxBytes)
	}
	root, err := strict.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("invalid %s: %w", PolicyKind, err)
	}
	r := &reader{}
	p := r.policy(root)
	if err := r.Err(); err != nil {
		return nil, fmt.Errorf("invalid %s: %w", PolicyKind, err)
	}
	return p, nil
}

// reader reads the parts of a policy.
type reader struct{ strict.Reader }

// policy reads the document.
func (r *reader) policy(root *yaml.Node) *Policy {
	if _, ok := r.TypeMeta(root, field.NewPath("policy"), Version, PolicyKind); !ok {
		return nil
	}
	p := Builtin()
	r.Object(root, nil, map[string]strict.Read{
		"apiVersion": strict.Skip,
		"kind":       strict.Skip,
		"rules":      strict.Into(&p.Rules, r.rules),
		"default":    strict.Into(&p.Default, r.offer),
		"health":     strict.Into(&p.Health, r.health),
	})
	return p
}
