// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"fmt"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/util/strict"
)

// text makes a string.
func text(value string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(value)
	return n
}

// object makes an object of keys and values.
func object(pairs ...string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for _, pair := range pairs {
		n.Content = append(n.Content, text(pair))
	}
	return n
}

// listAt returns the list at a key, and makes it if it is not there.
func listAt(n *yaml.Node, key string) (*yaml.Node, error) {
	list := document.Get(n, key)
	switch {
	case list == nil:
		list = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		n.Content = append(n.Content, text(key), list)
	case strict.IsNull(list) || strict.IsEmptyList(list):
		*list = yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	case list.Kind != yaml.SequenceNode:
		return nil, fmt.Errorf("%s: Invalid value: must be a list", key)
	}
	return list, nil
}

// removeEmpty removes an object or list in which nothing is left.
func removeEmpty(n *yaml.Node, key string) bool {
	if value := document.Get(n, key); value != nil && len(value.Content) == 0 {
		document.Remove(n, key)
		return true
	}
	return false
}

// removeIf removes keys. Comments above them go with them.
func removeIf(n *yaml.Node, gone func(key string) bool) {
	var kept []*yaml.Node
	for key, value := range document.Fields(n) {
		if !gone(key.Value) {
			kept = append(kept, key, value)
		}
	}
	n.Content = kept
}
