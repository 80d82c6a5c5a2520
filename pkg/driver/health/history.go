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

// historyFile keeps the histories of all GPUs. Several processes may use it at the same time.
type historyFile struct {
	path, bootID string
	// stored is the content that this process has last read or written.
	stored []byte
}

// fileContent is the format of the file.
type fileContent struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// BootID is that of the boot in which it was written.
	BootID string                 `json:"bootID"`
	GPUs   map[string]*gpuHistory `json:"gpus"`
}

// read returns the histories in the file, or none without a file. An error says why the file cannot
// be used; the next write replaces it.
func (f *historyFile) read(now time.Time) (map[string]*gpuHistory, error) {
	data, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]*gpuHistory{}, nil
	}
	if err != nil {
		return map[string]*gpuHistory{}, err
	}
	c, err := decode(data, now)
	if err != nil {
		return map[string]*gpuHistory{}, fmt.Errorf("read %s: %w", f.path, err)
	}
	f.stored = data
	if c.BootID != f.bootID {
		for _, g := range c.GPUs {
			g.restart()
		}
	}
	return c.GPUs, nil
}

func decode(data []byte, now time.Time) (*fileContent, error) {
	c := &fileContent{}
	// A newer driver may have added fields. Without the file a GPU that waits for a reset would be
	// offered again.
	if err := json.Unmarshal(data, c); err != nil {
		return nil, err
	}
	if c.APIVersion != fileVersion || c.Kind != fileKind {
		return nil, fmt.Errorf("apiVersion %q and kind %q, want %q and %q", c.APIVersion, c.Kind, fileVersion, fileKind)
	}
	if c.GPUs == nil {
		c.GPUs = map[string]*gpuHistory{}
	}
	for address, g := range c.GPUs {
		if g == nil || slices.Contains(g.Faults, nil) || slices.Contains(g.Past, nil) {
			return nil, fmt.Errorf("GPU %s: null", address)
		}
		for _, f := range g.Faults {
			if f.Reason == "" || !slices.Contains([]ending{whenQuiet, afterReset, whenRead}, f.Ending) {
				return nil, fmt.Errorf("GPU %s: a fault with the reason %q and the ending %q", address, f.Reason, f.Ending)
			}
			// A clock that was put back must not make it last for ever.
			f.First, f.Last, f.Gone = earliest(f.First, now), earliest(f.Last, now), earliest(f.Gone, now)
		}
		for _, p := range g.Past {
			p.Ended = earliest(p.Ended, now)
		}
		g.AskedAt, g.NoActionSince = earliest(g.AskedAt, now), earliest(g.NoActionSince, now)
		if g.forgotten(now) {
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

// forgotten reports whether all of it is so old that it does not count any more.
func (g *gpuHistory) forgotten(now time.Time) bool {
	return !slices.ContainsFunc(g.Faults, func(f *fault) bool { return now.Sub(f.Last) <= remember }) &&
		!slices.ContainsFunc(g.Past, func(p *past) bool { return now.Sub(p.Ended) <= remember })
}

// restart removes what does not survive a restart of the machine: faults that a reset ends, faults
// that a reading will find again, and those of partitions.
func (g *gpuHistory) restart() {
	g.Faults = slices.DeleteFunc(g.Faults, func(f *fault) bool { return f.Partition != nil || f.Unplaced || f.Ending != whenQuiet })
	g.Absent, g.Wants, g.AskedAt, g.NoActionSince, g.Uncorrected = false, "", time.Time{}, time.Time{}, nil
}

// encode is what the file is to have.
func (f *historyFile) encode(gpus map[string]*gpuHistory) ([]byte, error) {
	return json.MarshalIndent(fileContent{APIVersion: fileVersion, Kind: fileKind, BootID: f.bootID, GPUs: gpus}, "", "  ")
}

// write replaces the file if it differs from what this process has read or written. It
// returns false when another process is writing it at the same time.
func (f *historyFile) write(data []byte) (written bool, err error) {
	if bytes.Equal(data, f.stored) {
		return true, nil
	}
	// A lock of its own: users of the folder's lock do not try again, so that this would disturb them.
	lock := flock.New(filepath.Join(filepath.Dir(f.path), lockName))
	locked, err := lock.TryLock()
	if err != nil || !locked {
		return false, err
	}
	defer func() { _ = lock.Unlock() }()
	if err := host.ReplaceFile(f.path, data, fileMode); err != nil {
		return false, err
	}
	f.stored = data
	return true, nil
}
