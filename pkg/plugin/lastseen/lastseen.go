// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package lastseen keeps on disk what was last discovered of the GPUs of this machine,
// so that a process that starts while one of them does not answer knows what it is.
package lastseen

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/gofrs/flock"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// FileName is the name of the file in the plugin's data directory.
const FileName = "gpus.json"

// Version and kind of the file.
const (
	version = "gpus.partage.dev/v1"
	kind    = "DiscoveredGPUs"
)

const fileMode = 0o600

// pciAddress is what devices are named after. Some machines have domains of more than
// four digits.
var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// GPUs are those that were discovered on this machine.
type GPUs struct {
	// ThisBoot has those that were seen since the machine was started. It is never
	// nil, and has no broken GPUs. Its versions are those that were seen last.
	ThisBoot *gpu.Node
	// Earlier has those that were seen before and not since. It is like ThisBoot.
	Earlier *gpu.Node
}

// File is the file. Several processes may use it at the same time; it is for one
// goroutine of each.
type File struct {
	path, bootID string
	// stored is what the file is known to have.
	stored []byte
}

// New describes the file in a data directory, for this boot of the machine.
func New(dataDir, bootID string) *File {
	return &File{path: filepath.Join(dataDir, FileName), bootID: bootID}
}

// content is the form of the file. Fields may be added; a version that does not know
// them ignores them.
type content struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// BootID is the boot in which GPUs were seen. EarlierGPUs were seen in others.
	BootID        string      `json:"bootID"`
	DriverVersion string      `json:"driverVersion"`
	CUDAVersion   gpu.Version `json:"cudaVersion"`
	GPUs          []gpu.GPU   `json:"gpus"`
	EarlierGPUs   []gpu.GPU   `json:"earlierGPUs,omitempty"`
}

// Read returns what was written last. Without a file there are no GPUs. An error says
// why the file cannot be used; the next Write replaces it.
func (f *File) Read() (GPUs, error) {
	none := GPUs{ThisBoot: &gpu.Node{}, Earlier: &gpu.Node{}}
	data, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return none, nil
	}
	if err != nil {
		return none, fmt.Errorf("read what was last discovered of the GPUs: %w", err)
	}
	c, err := decode(data)
	if err != nil {
		return none, fmt.Errorf("read what was last discovered of the GPUs: %s: %w", f.path, err)
	}
	f.stored = data
	seen := GPUs{ThisBoot: c.node(c.GPUs), Earlier: c.node(c.EarlierGPUs)}
	if c.BootID != f.bootID {
		seen.Earlier, _ = seen.ThisBoot.Keeping(seen.Earlier)
		seen.ThisBoot = c.node(nil)
	}
	return seen, nil
}

func decode(data []byte) (*content, error) {
	c := &content{}
	if err := json.Unmarshal(data, c); err != nil {
		return nil, err
	}
	if c.APIVersion != version || c.Kind != kind {
		return nil, fmt.Errorf("apiVersion %q and kind %q, want %q and %q", c.APIVersion, c.Kind, version, kind)
	}
	if c.BootID == "" {
		return nil, errors.New("no bootID")
	}
	known := map[string]bool{}
	for _, gpus := range [][]gpu.GPU{c.GPUs, c.EarlierGPUs} {
		for i := range gpus {
			address := gpus[i].PCIAddress
			if !pciAddress.MatchString(address) || known[address] {
				return nil, fmt.Errorf("%q is no PCI address or appears twice", address)
			}
			known[address] = true
		}
	}
	return c, nil
}

func (c *content) node(gpus []gpu.GPU) *gpu.Node {
	return &gpu.Node{DriverVersion: c.DriverVersion, CUDAVersion: c.CUDAVersion, GPUs: gpus}
}

// Write replaces the file if it differs from what this process has read or written.
// The versions are those of ThisBoot. When another process is writing at the same
// time it does nothing; both see the same GPUs.
func (f *File) Write(seen GPUs) error {
	data, err := json.MarshalIndent(content{
		APIVersion: version, Kind: kind, BootID: f.bootID,
		DriverVersion: seen.ThisBoot.DriverVersion, CUDAVersion: seen.ThisBoot.CUDAVersion,
		GPUs: seen.ThisBoot.GPUs, EarlierGPUs: seen.Earlier.GPUs,
	}, "", "  ")
	if err != nil {
		return fmt.Errorf("write what was discovered of the GPUs: %w", err)
	}
	if bytes.Equal(data, f.stored) {
		return nil
	}
	lock := flock.New(filepath.Dir(f.path), flock.SetFlag(os.O_RDONLY))
	locked, err := lock.TryLock()
	if err != nil {
		return fmt.Errorf("write what was discovered of the GPUs: lock: %w", err)
	}
	if !locked {
		return nil
	}
	defer func() { _ = lock.Unlock() }()
	if err := host.ReplaceFile(f.path, data, fileMode); err != nil {
		return fmt.Errorf("write what was discovered of the GPUs: %w", err)
	}
	f.stored = data
	return nil
}
