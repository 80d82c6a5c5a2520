// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gofrs/flock"

	"github.com/partage-dev/partage/pkg/node/host"
)

// FileName is the name of the file in the plugin's data directory.
const FileName = "health.json"

const lockName = "health.lock"

// Version and kind of the file.
const (
	fileVersion = "health.partage.dev/v1"
	fileKind    = "GPUHealth"
	fileMode    = 0o600
)

// history is the file. Several processes may use it at the same time.
type history struct {
	path, bootID string
	// stored is what the file is known to have.
	stored []byte
}

// content is the form of the file.
type content struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// BootID is the boot of the machine in which it was written.
	BootID string             `json:"bootID"`
	GPUs   map[string]*record `json:"gpus"`
}

// read returns what was written last. Without a file there is nothing. An error says why the
// file cannot be used; the next write replaces it.
func (h *history) read(now time.Time) (map[string]*record, error) {
	data, err := os.ReadFile(h.path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]*record{}, nil
	}
	if err != nil {
		return map[string]*record{}, fmt.Errorf("read the history of the GPUs' health: %w", err)
	}
	c, err := decode(data, now)
	if err != nil {
		return map[string]*record{}, fmt.Errorf("read the history of the GPUs' health: %s: %w", h.path, err)
	}
	h.stored = data
	if c.BootID != h.bootID {
		for _, r := range c.GPUs {
			r.restart()
		}
	}
	return c.GPUs, nil
}

func decode(data []byte, now time.Time) (*content, error) {
	c := &content{}
	// A newer driver may have added fields. Without the file a GPU that waits for a reset would be
	// offered again.
	if err := json.Unmarshal(data, c); err != nil {
		return nil, err
	}
	if c.APIVersion != fileVersion || c.Kind != fileKind {
		return nil, fmt.Errorf("apiVersion %q and kind %q, want %q and %q", c.APIVersion, c.Kind, fileVersion, fileKind)
	}
	if c.GPUs == nil {
		c.GPUs = map[string]*record{}
	}
	for address, r := range c.GPUs {
		if r == nil || slices.Contains(r.Faults, nil) || slices.Contains(r.Past, nil) {
			return nil, fmt.Errorf("GPU %s: null", address)
		}
		for _, f := range r.Faults {
			if f.Reason == "" || !slices.Contains([]ending{whenQuiet, afterReset, whenRead}, f.Ending) {
				return nil, fmt.Errorf("GPU %s: a fault with the reason %q and the ending %q", address, f.Reason, f.Ending)
			}
			// A clock that was put back must not make it last for ever.
			f.First, f.Last, f.Gone = earliest(f.First, now), earliest(f.Last, now), earliest(f.Gone, now)
		}
		for _, p := range r.Past {
			p.Ended = earliest(p.Ended, now)
		}
		r.Asked, r.Content = earliest(r.Asked, now), earliest(r.Content, now)
		if r.forgotten(now) {
			delete(c.GPUs, address)
		}
	}
	return c, nil
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// forgotten reports whether nothing of it counts any more.
func (r *record) forgotten(now time.Time) bool {
	return !slices.ContainsFunc(r.Faults, func(f *fault) bool { return now.Sub(f.Last) <= remember }) &&
		!slices.ContainsFunc(r.Past, func(p *past) bool { return now.Sub(p.Ended) <= remember })
}

// restart ends what does not survive a restart of the machine: what is mended by a reset,
// what a reading will find again, and what was wrong with partitions.
func (r *record) restart() {
	r.Faults = slices.DeleteFunc(r.Faults, func(f *fault) bool { return f.Partition != nil || f.Unplaced || f.Ending != whenQuiet })
	r.Absent, r.Wants, r.Asked, r.Content, r.Uncorrected = false, "", time.Time{}, time.Time{}, nil
}

// encode is what the file is to have.
func (h *history) encode(gpus map[string]*record) ([]byte, error) {
	data, err := json.MarshalIndent(content{APIVersion: fileVersion, Kind: fileKind, BootID: h.bootID, GPUs: gpus}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the history of the GPUs' health: %w", err)
	}
	return data, nil
}

// write replaces the file if it differs from what this process has read or written. It
// returns false when another process is writing it at the same time.
func (h *history) write(data []byte) (written bool, err error) {
	if bytes.Equal(data, h.stored) {
		return true, nil
	}
	// Not the folder's lock, which others use who do not try again.
	lock := flock.New(filepath.Join(filepath.Dir(h.path), lockName))
	locked, err := lock.TryLock()
	if err != nil {
		return false, fmt.Errorf("write the history of the GPUs' health: lock: %w", err)
	}
	if !locked {
		return false, nil
	}
	defer func() { _ = lock.Unlock() }()
	if err := host.ReplaceFile(h.path, data, fileMode); err != nil {
		return false, fmt.Errorf("write the history of the GPUs' health: %w", err)
	}
	h.stored = data
	return true, nil
}
