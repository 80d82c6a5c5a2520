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

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
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

// File is the file. Several processes may use it at the same time: both see the same GPUs, and what one has damaged the next
// discovery replaces.
type File struct{ path, bootID string }

// New describes the file in a data directory, for this boot of the machine.
func New(dataDir, bootID string) *File {
	return &File{path: filepath.Join(dataDir, FileName), bootID: bootID}
}

// content is the form of the file. Fields may be added; a version that does not know
// them ignores them.
type content struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// BootID is the boot in which it was written.
	BootID        string      `json:"bootID"`
	DriverVersion string      `json:"driverVersion"`
	CUDAVersion   gpu.Version `json:"cudaVersion"`
	GPUs          []gpu.GPU   `json:"gpus"`
	// Removed are those of the GPUs that were not seen in this boot, or were taken out, by PCI address.
	Removed []string `json:"removed,omitempty"`
}

// Read returns what was written last, and the PCI addresses of the GPUs that were taken out, or not seen since the machine was started.
// Without a file there are no GPUs. An error says why the file cannot be used; the next Write replaces it.
func (f *File) Read() (seen *gpu.Node, removed []string, err error) {
	data, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return &gpu.Node{}, nil, nil
	}
	var c *content
	if err == nil {
		c, err = decode(data)
	}
	if err != nil {
		return &gpu.Node{}, nil, fmt.Errorf("read what was last discovered of the GPUs: %s: %w", f.path, err)
	}
	if c.BootID != f.bootID {
		c.Removed = nil
		for i := range c.GPUs {
			c.Removed = append(c.Removed, c.GPUs[i].PCIAddress)
		}
	}
	return &gpu.Node{DriverVersion: c.DriverVersion, CUDAVersion: c.CUDAVersion, GPUs: c.GPUs}, c.Removed, nil
}

func decode(data []byte) (*content, error) {
	c := &content{}
	if err := json.Unmarshal(data, c); err != nil {
		return nil, err
	}
	if c.APIVersion != version || c.Kind != kind {
		return nil, fmt.Errorf("apiVersion %q and kind %q, want %q and %q", c.APIVersion, c.Kind, version, kind)
	}
	known := map[string]bool{}
	for i := range c.GPUs {
		address := c.GPUs[i].PCIAddress
		if !pciAddress.MatchString(address) || known[address] {
			return nil, fmt.Errorf("%q is no PCI address or appears twice", address)
		}
		known[address] = true
	}
	return c, nil
}

// Write replaces the file if it says something else.
func (f *File) Write(seen *gpu.Node, removed []string) error {
	data, err := json.MarshalIndent(content{
		APIVersion: version, Kind: kind, BootID: f.bootID, DriverVersion: seen.DriverVersion, CUDAVersion: seen.CUDAVersion, GPUs: seen.GPUs, Removed: removed,
	}, "", "  ")
	if err == nil {
		if stored, readErr := os.ReadFile(f.path); readErr == nil && bytes.Equal(data, stored) {
			return nil
		}
		err = host.ReplaceFile(f.path, data, fileMode)
	}
	if err != nil {
		return fmt.Errorf("write what was discovered of the GPUs: %w", err)
	}
	return nil
}
