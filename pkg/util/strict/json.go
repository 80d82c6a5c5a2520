// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// ParseJSON reads one document in JSON, as nodes like those of Parse. They have no
// lines.
//
// The YAML library is not used for this: it refuses some escapes and long keys that are
// right in JSON.
func ParseJSON(data []byte) (*yaml.Node, error) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	root, err := nextValue(decoder)
	if errors.Is(err, io.EOF) {
		err = errors.New("unexpected end of JSON input")
	}
	if err != nil {
		return nil, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is something after the top-level value")
	}
	return root, nil
}

// nextValue reads a value with all that is in it.
func nextValue(decoder *json.Decoder) (*yaml.Node, error) {
	token, err := decoder.Token()
	if err != nil {
		return nil, err
	}
	delimiter, ok := token.(json.Delim)
	if !ok {
		return scalar(token), nil
	}
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	if delimiter == '[' {
		n = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	}
	for decoder.More() {
		// The decoder sees to it that keys are strings and have values.
		child, err := nextValue(decoder)
		if err != nil {
			return nil, err
		}
		n.Content = append(n.Content, child)
	}
	_, err = decoder.Token() // the end of it
	return n, err
}

func scalar(token json.Token) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: fmt.Sprint(token)}
	switch value := token.(type) {
	case string:
		n.Tag = "!!str"
	case bool:
		n.Tag = "!!bool"
		n.Value = strconv.FormatBool(value)
	case json.Number:
		n.Tag = "!!int"
		if _, err := value.Int64(); err != nil {
			n.Tag = "!!float"
		}
	case nil:
		n.Tag, n.Value = "!!null", "null"
	}
	return n
}
