// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// More than this is not from a container runtime.
const (
	maxState  = 1 << 20
	maxConfig = 16 << 20
)

// state is the part that matters of what the runtime writes to a hook.
type state struct {
	Bundle string `json:"bundle"`
	PID    int    `json:"pid"`
}

// container is the part that matters of a bundle's config.json.
type container struct {
	// pid is that of its first process, which does not run its program yet.
	pid     int
	Process *struct {
		Env []string `json:"env"`
	} `json:"process"`
	Mounts []mount `json:"mounts"`
	Linux  struct {
		Namespaces []namespace `json:"namespaces"`
	} `json:"linux"`
}

type namespace struct {
	Type string `json:"type"`
}

type mount struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
}

// readContainer takes what the runtime writes to hooks.
func readContainer(input io.Reader) (*container, error) {
	var s state
	data, err := readAll(input, maxState)
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err != nil {
		return nil, fmt.Errorf("read the container's state from the runtime: %w", err)
	}
	if !filepath.IsAbs(s.Bundle) {
		return nil, fmt.Errorf("the container runtime gives the bundle %s: want an absolute path", quote.Text(s.Bundle))
	}
	path := filepath.Join(s.Bundle, "config.json")
	if data, err = readFile(path, maxConfig); err != nil {
		return nil, fmt.Errorf("read the container's configuration: %w", err)
	}
	c := container{pid: s.PID}
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("read the container's configuration %s: %w", quote.Text(path), err)
	}
	if c.Process == nil {
		return nil, fmt.Errorf("the container's configuration %s has no process", quote.Text(path))
	}
	return &c, nil
}

// hasOwnUsers reports whether the container has a user namespace, as those of a pod with
// hostUsers: false have.
func (c *container) hasOwnUsers() bool {
	return slices.Contains(c.Linux.Namespaces, namespace{Type: "user"})
}

// over returns where something is mounted over a folder that the container has from the host, or over a part of it, or "". What
// comes later lies over what came before. has reports whether it has the folder at all.
func (c *container) over(folder, from string) (at string, has bool) {
	for _, m := range c.Mounts {
		switch to := filepath.Clean(m.Destination); {
		case to == folder && filepath.Clean(m.Source) == from:
			at, has = "", true
		case to == folder, isBelow(to, folder), isBelow(folder, to):
			at = m.Destination
		}
	}
	return at, has
}

func isBelow(path, folder string) bool {
	return strings.HasPrefix(path, strings.TrimSuffix(folder, "/")+"/")
}

// mountAt returns what the container has at a path: of several mounts the last one
// covers the others.
func (c *container) mountAt(path string) (mount, bool) {
	for i := len(c.Mounts) - 1; i >= 0; i-- {
		if filepath.Clean(c.Mounts[i].Destination) == path {
			return c.Mounts[i], true
		}
	}
	return mount{}, false
}
