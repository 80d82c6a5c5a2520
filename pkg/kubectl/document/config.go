// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package document

import (
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

// Config is a configuration with the name that a node's label would choose it by.
type Config struct {
	// Name is the key in a ConfigMap, or "" for a file that is the configuration itself.
	Name string
	// Path leads from the stream to the configuration, for messages; "" for a plain file.
	Path string
	Root *yaml.Node
}

// Configs returns the configurations in a stream. ConfigMaps and lists of them are opened.
func Configs(data []byte) ([]Config, error) {
	documents, err := Split(data)
	if err != nil {
		return nil, err
	}
	var configs []Config
	for _, d := range documents {
		root, err := d.Parse()
		if err != nil {
			return nil, err
		}
		if root == nil {
			continue
		}
		found, err := open(root.Content[0], "")
		if err != nil {
			return nil, fmt.Errorf("document in line %d: %w", d.Line, err)
		}
		configs = append(configs, found...)
	}
	if len(configs) == 0 {
		return nil, errors.New("is empty")
	}
	return configs, nil
}

// open returns what is in an object.
func open(n *yaml.Node, path string) (configs []Config, err error) {
	switch kind := Text(n, "kind"); {
	case kind == "ConfigMap":
		return inConfigMap(n, path+"ConfigMap "+quote.Name(Text(n, "metadata", "name")))
	case kind != "List" && kind != "ConfigMapList" && kind != "" && Get(n, "apiVersion") != nil:
		return nil, fmt.Errorf("%skind: Unsupported value: %s: want a ConfigMap or the configuration itself", path, quote.Text(kind))
	case kind != "List" && kind != "ConfigMapList":
		return []Config{{Path: path, Root: n}}, nil
	}
	items := Get(n, "items")
	if items == nil || items.Kind != yaml.SequenceNode {
		return nil, errors.New("items: Invalid value: must be a list")
	}
	for i, item := range items.Content {
		if kind := Text(item, "kind"); kind != "ConfigMap" {
			return nil, fmt.Errorf("items[%d].kind: Unsupported value: %s: want ConfigMap", i, quote.Text(kind))
		}
		found, err := open(item, fmt.Sprintf("%sitems[%d]: ", path, i))
		if err != nil {
			return nil, err
		}
		configs = append(configs, found...)
	}
	return configs, nil
}

func inConfigMap(n *yaml.Node, path string) ([]Config, error) {
	data := Get(n, "data")
	if data == nil || data.Kind != yaml.MappingNode || len(data.Content) == 0 {
		return nil, fmt.Errorf("%s: data: Required value: must hold configurations", path)
	}
	var configs []Config
	for key, value := range Fields(data) {
		at := fmt.Sprintf("%s: data[%s]", path, quote.Name(key.Value))
		if key.Kind != yaml.ScalarNode || value.Kind != yaml.ScalarNode || value.ShortTag() != "!!str" {
			return nil, fmt.Errorf("%s: Invalid value: must be a text", at)
		}
		root, err := strict.Parse([]byte(value.Value))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		configs = append(configs, Config{Name: key.Value, Path: at + ": ", Root: root})
	}
	return configs, nil
}
