// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package document takes apart what a user gives to a migration: several YAML documents in
// one stream, and ConfigMaps that hold the real configuration.
package document

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"regexp"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	// MaxBytes is how much is read: as much as etcd stores in one object, times ten.
	MaxBytes = 16 << 20
	// maxDocuments bounds the work, and the output.
	maxDocuments = 10000
)

// separator begins a document. YAML allows it nowhere else at the start of a line.
var separator = regexp.MustCompile(`(?m)^---([ \t].*)?\r?$\n?`)

// Document is one document of a stream.
type Document struct {
	// Text is as it is written, without the separator.
	Text []byte
	// Line is the line of the stream in which it begins, from 1.
	Line int
}

// ReadFile reads a file, or standard input for "-", up to MaxBytes.
func ReadFile(in io.Reader, file string) ([]byte, error) {
	if file == "-" {
		file = "standard input"
	} else {
		opened, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer func() { _ = opened.Close() }()
		in = opened
	}
	data, err := io.ReadAll(io.LimitReader(in, MaxBytes+1))
	if err == nil && len(data) > MaxBytes {
		err = fmt.Errorf("is longer than %d bytes", MaxBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return data, nil
}

// Split splits a stream. Documents without any content are there, too, as long as they have
// a text: it may be a comment.
func Split(data []byte) ([]Document, error) {
	var documents []Document
	add := func(text []byte, start int) error {
		if len(bytes.TrimSpace(text)) == 0 {
			return nil
		}
		if len(documents) == maxDocuments {
			return fmt.Errorf("has more than %d documents", maxDocuments)
		}
		documents = append(documents, Document{Text: text, Line: 1 + bytes.Count(data[:start], []byte("\n"))})
		return nil
	}
	start := 0
	for _, at := range separator.FindAllSubmatchIndex(data, -1) {
		if err := add(data[start:at[0]], start); err != nil {
			return nil, err
		}
		start = at[1]
		// What follows the separator in its line belongs to the document.
		if at[2] >= 0 && len(bytes.TrimSpace(data[at[2]:at[3]])) > 0 {
			start = at[2]
		}
	}
	if err := add(data[start:], start); err != nil {
		return nil, err
	}
	return documents, nil
}

// Parse reads one document with its comments. It returns nil for one without content.
func (d Document) Parse() (*yaml.Node, error) {
	root, err := strict.Document(d.Text)
	if err != nil && !errors.Is(err, strict.ErrEmpty) {
		return nil, fmt.Errorf("document in line %d: %w", d.Line, err)
	}
	return root, nil
}

// Fields goes through the keys of an object and their values. Anything else has none.
func Fields(n *yaml.Node) iter.Seq2[*yaml.Node, *yaml.Node] {
	return func(yield func(key, value *yaml.Node) bool) {
		if n == nil || n.Kind != yaml.MappingNode {
			return
		}
		for i := 0; i+1 < len(n.Content); i += 2 {
			if !yield(n.Content[i], n.Content[i+1]) {
				return
			}
		}
	}
}

// Get returns the value of a key of an object, or nil.
func Get(n *yaml.Node, key string) *yaml.Node {
	for k, value := range Fields(n) {
		if k.Kind == yaml.ScalarNode && k.Value == key {
			return value
		}
	}
	return nil
}

// Remove removes a key of an object, if it has it.
func Remove(n *yaml.Node, key string) { RemoveIf(n, func(k string) bool { return k == key }) }

// RemoveIf removes keys of an object. Comments above them go with them.
func RemoveIf(n *yaml.Node, gone func(key string) bool) {
	var kept []*yaml.Node
	for key, value := range Fields(n) {
		if !gone(key.Value) {
			kept = append(kept, key, value)
		}
	}
	n.Content = kept
}

// At returns the value at a path of keys, or nil.
func At(n *yaml.Node, keys ...string) *yaml.Node {
	for _, key := range keys {
		n = Get(n, key)
	}
	return n
}

// List returns the items of a list at a key.
func List(n *yaml.Node, key string) []*yaml.Node {
	if n = Get(n, key); n == nil || n.Kind != yaml.SequenceNode {
		return nil
	}
	return n.Content
}

// Text returns the value of a scalar at a path of keys, or "".
func Text(n *yaml.Node, keys ...string) string {
	if n = At(n, keys...); n != nil && n.Kind == yaml.ScalarNode {
		return n.Value
	}
	return ""
}

// Items returns the objects of a list.
func Items(list *yaml.Node) ([]*yaml.Node, error) {
	items := Get(list, "items")
	if items == nil || items.Kind != yaml.SequenceNode {
		return nil, errors.New("items: Invalid value: must be a list")
	}
	return items.Content, nil
}

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
		return nil, fmt.Errorf("%skind: Unsupported value: %s: want a ConfigMap or the configuration itself; kubectl gpu migrate pods translates pods and what makes them",
			path, quote.Text(kind))
	case kind != "List" && kind != "ConfigMapList":
		return []Config{{Path: path, Root: n}}, nil
	}
	items, err := Items(n)
	if err != nil {
		return nil, err
	}
	for i, item := range items {
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
