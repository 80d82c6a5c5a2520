// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package boards has what the driver reads from models of GPUs: profiles, placements, memory.
// It is for tools that have no GPU at hand, such as templates of nodes that do not exist yet.
// The driver itself always asks the hardware.
//
// The facts are what the driver's own binding reads from the simulated boards
// (test/gpusim/catalog); make golden writes them, and test/flow/claims compares them.
package boards

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/gpu"
)

//go:embed facts/*.yaml
var files embed.FS

// Short are what people say for the usual variant of a board.
var Short = map[string]string{"a100": "a100-80", "gh200": "gh200-144", "h100": "h100-80-sxm"}

// FullName returns the name of the usual variant for a short name, and others as they are.
func FullName(name string) string {
	name = strings.ToLower(name)
	if long, isShort := Short[name]; isShort {
		return long
	}
	return name
}

// Names returns the names of all boards, sorted.
func Names() []string {
	names, _ := fs.Glob(files, "facts/*.yaml") // the pattern is right
	for i, name := range names {
		names[i] = strings.TrimSuffix(path.Base(name), ".yaml")
	}
	slices.Sort(names)
	return names
}

// Load returns what a node with one GPU of a board reports. A short name stands for the usual
// variant. The caller owns the result.
func Load(name string) (*gpu.Node, error) {
	name = FullName(name)
	data, err := files.ReadFile(path.Join("facts", name+".yaml"))
	if err != nil {
		return nil, fmt.Errorf("the GPU model %q is not known; there are %s", name, strings.Join(Names(), ", "))
	}
	var node gpu.Node
	if err := yaml.UnmarshalStrict(data, &node); err != nil {
		return nil, fmt.Errorf("read the facts about the GPU model %s: %w", name, err)
	}
	if len(node.GPUs) != 1 {
		return nil, fmt.Errorf("the facts about the GPU model %s are of %d GPUs, not of one", name, len(node.GPUs))
	}
	return &node, nil
}
