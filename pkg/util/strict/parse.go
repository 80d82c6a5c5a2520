// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package strict reads what people and other programs write in YAML or JSON. It
// refuses unknown and repeated fields, and collects everything that is wrong, each
// fault with its field, the value and what would be right.
//
// The text may come from anyone: nothing here panics, and what a document costs is
// bounded by its size.
package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// maxUnreadable is how much is said of YAML that cannot be read.
const maxUnreadable = 400

// ErrEmpty says that a document has nothing, or nothing but comments.
var ErrEmpty = errors.New("is empty")

// Parse reads one document in YAML. Aliases stay aliases, so
// that a small file cannot become a large document.
func Parse(data []byte) (root *yaml.Node, err error) {
	document, err := Document(data)
	if err != nil {
		return nil, err
	}
	return document.Content[0], nil
}

// Document does the same, and returns the node of the document, which has the root and the comments around it.
func Document(data []byte) (document *yaml.Node, err error) {
	// The YAML library panics where it finds itself in a state that it believes
	// to be impossible.
	defer func() {
		if p := recover(); p != nil {
			document, err = nil, unreadable(fmt.Errorf("this YAML cannot be read: %v", p))
		}
	}()
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var first, next yaml.Node
	if err := decoder.Decode(&first); errors.Is(err, io.EOF) {
		return nil, ErrEmpty
	} else if err != nil {
		return nil, unreadable(err)
	}
	if err := decoder.Decode(&next); err == nil {
		return nil, fmt.Errorf("must be one YAML document, another one begins in line %d", next.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, unreadable(err)
	}
	if len(first.Content) != 1 {
		return nil, ErrEmpty
	}
	return &first, nil
}

// unreadable is an error of the YAML library, which repeats names as they are written.
func unreadable(err error) error { return errors.New(quote.Line(err.Error(), maxUnreadable)) }
