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
	"strconv"
	"strings"
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
	// First is the node's first process as the machine sees it; ticks and boot tell it from a later one of the same id.
	First int    `json:"first"`
	Ticks uint64 `json:"ticks"`
	Boot  string `json:"boot"`
}

// Options are what a user chooses.
type Options struct {
	Machine       string `json:"machine,omitempty"`
	Node          string `json:"node"`
	FeatureGates  string `json:"featureGates,omitempty"`
	RuntimeConfig string `json:"runtimeConfig,omitempty"`
	SyncFrequency string `json:"syncFrequency,omitempty"`
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

// identify notes which process the first is.
func (s *State) identify(pid int) error {
	stat, err := readStat(pid)
	if err != nil {
		return err
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	s.First, s.Ticks, s.Boot = pid, stat.ticks, boot
	return nil
}

// Alive says whether the first process still runs.
func (s *State) Alive() bool {
	boot, err := bootID()
	if err != nil || boot != s.Boot {
		return false
	}
	stat, err := readStat(s.First)
	return err == nil && stat.ticks == s.Ticks && stat.state != "Z" && stat.state != "X"
}

type procStat struct {
	state string
	ticks uint64 // since boot, when it started
}

func readStat(pid int) (procStat, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return procStat{}, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return parseStat(string(b))
}

// parseStat reads /proc/PID/stat; the name, in brackets, may hold anything.
func parseStat(text string) (procStat, error) {
	const startField = 22 - 3 // counted from the state, which is field 3
	_, after, ok := cutLast(text, ")")
	fields := strings.Fields(after)
	if !ok || len(fields) <= startField {
		return procStat{}, fmt.Errorf("parse process status %q: too few fields", text)
	}
	ticks, err := strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("parse process status %q: %w", text, err)
	}
	return procStat{state: fields[0], ticks: ticks}, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
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
