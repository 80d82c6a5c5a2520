// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"math"
	"regexp"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// describe names what a value is as a writer of YAML thinks of it.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias (*), which is not allowed"
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
	return "of type " + quote.Text(n.ShortTag())
}

// given is a value for a message.
func given(n *yaml.Node) any {
	if n.Kind != yaml.ScalarNode || IsNull(n) {
		return field.OmitValueType{}
	}
	if value, ok := number(n); ok && value == math.Trunc(value) && math.Abs(value) < 1<<53 {
		return int64(value)
	} else if ok {
		return value
	}
	return quote.Short(n.Value)
}

// plainName is a field's name that needs no quotes in a message.
var plainName = regexp.MustCompile(`^[0-9A-Za-z_-]{1,64}$`)

func fieldName(key *yaml.Node) string {
	if key.Kind == yaml.ScalarNode && plainName.MatchString(key.Value) {
		return key.Value
	}
	return quote.Text(key.Value)
}
