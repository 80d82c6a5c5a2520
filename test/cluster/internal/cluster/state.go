// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cluster brings a cluster up and down, from the machine's side.
package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

// Phase of a cluster.
type Phase string

// A cluster is starting until up has returned.
const (
	Starting Phase = "starting"
	Up       Phase = "up"
)

// State is the record of a running cluster.
type State struct {
	Phase   Phase     `json:"phase"`
	Since   time.Time `json:"since"`
	Options Options   `json:"options"`
	// First are the nodes' first processes, in the order of the options.
	First []Process `json:"first"`
}

// version says which version of a component a cluster with these options has; kubectl is always the usual one.
func (o Options) version(component, usual string) string {
	if o.Kubernetes == "" || component != "kubernetes" {
		return usual
	}
	return fmt.Sprintf("v%s (kubectl %s)", o.Kubernetes, usual)
}

// Load returns the record of a cluster, nil when there is none.
func Load(c layout.Cluster) (*State, error) {
	b, err := os.ReadFile(c.State())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no record is no error
	}
	if err != nil {
		return nil, fmt.Errorf("read the state of cluster %s: %w", c.Name, err)
	}
	var s State
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read the state of cluster %s (%s): %w", c.Name, c.State(), err)
	}
	return &s, nil
}

func (s *State) save(c layout.Cluster) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the state of cluster %s: %w", c.Name, err)
	}
	if err := renameio.WriteFile(c.State(), b, 0o644); err != nil {
		return fmt.Errorf("write the state of cluster %s: %w", c.Name, err)
	}
	return nil
}

// Alive says whether all nodes are.
func (s *State) Alive() bool {
	return !slices.ContainsFunc(s.First, func(p Process) bool { return !p.Alive() })
}

// first returns the name and the first process of a node; without a name, of the cluster's first node.
func (s *State) first(node string) (string, Process, error) {
	for i, n := range s.Options.Nodes {
		if n.Name == node || node == "" {
			return n.Name, s.First[i], nil
		}
	}
	return "", Process{}, fmt.Errorf("there is no node %s; there are %s", node, Names(s.Options.Nodes))
}

// lock keeps two commands from bringing one cluster up or down together. It is free again when this process ends, however it ends.
func lock(c layout.Cluster) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(c.Lock()), 0o755); err != nil {
		return nil, fmt.Errorf("make the cluster's folder: %w", err)
	}
	f, err := os.OpenFile(c.Lock(), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the lock of cluster %s: %w", c.Name, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		busy := fmt.Errorf("another command is bringing cluster %s up or down: wait for it, or end it with Ctrl-C", c.Name)
		return nil, errors.Join(busy, f.Close())
	}
	return func() { _ = f.Close() }, nil
}
