// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package templates has the manifests of this folder, which are to be applied as they are.
// kubectl gpu advise makes its manifests of them.
package templates

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"
)

//go:embed *.yaml
var files embed.FS

// valuesSuffix is that of files with values for helm.
const valuesSuffix = ".values.yaml"

// comment is how lines of the header begin.
const comment = "#"

// Names returns the names of all files, sorted.
func Names() ([]string, error) {
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return nil, fmt.Errorf("list the templates: %w", err)
	}
	return names, nil
}

// IsValues reports whether a file has values for helm, and is not for kubectl.
func IsValues(name string) bool { return strings.HasSuffix(name, valuesSuffix) }

// Read returns a file.
func Read(name string) ([]byte, error) {
	data, err := files.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read the template %s: %w", name, err)
	}
	return data, nil
}

// Body returns a file without its header.
func Body(data []byte) []byte {
	rest := string(data)
	for strings.HasPrefix(rest, comment) {
		_, after, found := strings.Cut(rest, "\n")
		if !found {
			return nil
		}
		rest = after
	}
	return []byte(rest)
}
