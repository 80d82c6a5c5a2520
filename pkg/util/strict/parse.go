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

// Parse reads one document in YAML. Aliases stay aliases, so
// that a small file cannot become a large document.
func Parse(data []byte) (root *yaml.Node, err error) {
	// The YAML library panics where it finds itself in a state that it believes
	// to be impossible.
	defer func() {
		if p := recover(); p != nil {
			root, err = nil, unreadable(fmt.Errorf("this YAML cannot be read: %v", p))
		}
	}()
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var document, next yaml.Node
	if err := decoder.Decode(&document); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, errors.New("is empty")
		}
		return nil, unreadable(err)
	}
	if err := decoder.Decode(&next); err == nil {
		return nil, fmt.Errorf("must be one YAML document, another one begins in line %d", next.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, unreadable(err)
	}
	if len(document.Content) != 1 {
		return nil, errors.New("is empty")
	}
	return document.Content[0], nil
}

// unreadable is an error of the YAML library, which repeats names as they are written.
func unreadable(err error) error { return errors.New(quote.Line(err.Error(), maxUnreadable)) }
