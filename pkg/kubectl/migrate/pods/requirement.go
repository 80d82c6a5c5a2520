// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Operators of a requirement.
const (
	in           = "In"
	notIn        = "NotIn"
	exists       = "Exists"
	doesNotExist = "DoesNotExist"
	greater      = "Gt"
	less         = "Lt"
)

var operators = []string{in, notIn, exists, doesNotExist, greater, less}

// maxValues bounds an expression.
const maxValues = 64

// labelValue is what Kubernetes takes as the value of a label.
var labelValue = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$`)

// requirement is one condition for a node's label.
type requirement struct {
	key, operator string
	values        []string
}

func (r requirement) String() string {
	return strings.TrimSpace(r.key + " " + r.operator + " " + strings.Join(r.values, ", "))
}

// readRequirement reads an entry of matchExpressions.
func readRequirement(n *yaml.Node) (requirement, error) {
	r := requirement{key: document.Text(n, "key"), operator: document.Text(n, "operator")}
	if r.key == "" {
		return r, fmt.Errorf("key: Required value: must be the key of a label")
	}
	if !slices.Contains(operators, r.operator) {
		return r, fmt.Errorf("operator: Unsupported value: %s: supported values: %s", quote.Text(r.operator), strings.Join(operators, ", "))
	}
	for _, value := range document.List(n, "values") {
		r.values = append(r.values, value.Value)
	}
	return r, nil
}

// check refuses what the API would refuse, for labels that are translated.
func (r requirement) check() error {
	switch r.operator {
	case in, notIn:
		if len(r.values) == 0 {
			return fmt.Errorf("values: Required value: at least one for %s", r.operator)
		}
	case greater, less:
		if len(r.values) != 1 {
			return fmt.Errorf("values: Invalid value: must be one number for %s", r.operator)
		}
	default:
		if len(r.values) > 0 {
			return fmt.Errorf("values: Forbidden: none for %s", r.operator)
		}
	}
	if len(r.values) > maxValues {
		return fmt.Errorf("values: Too many: %d: must have at most %d items", len(r.values), maxValues)
	}
	for _, value := range r.values {
		if !labelValue.MatchString(value) {
			return fmt.Errorf("values: Invalid value: %s: must be the value of a label", quote.Text(value))
		}
	}
	return nil
}
