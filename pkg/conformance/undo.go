// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/holder"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
)

// undo says how a GPU was before part C, and what part C may have made. It is written
// before anything is changed, so that a later run can put the GPU back whatever ended this
// one. Part C begins on GPUs without instances, so every instance at Partition is its own.
type undo struct {
	PCIAddress  string          `json:"pciAddress"`
	UUID        string          `json:"uuid"`
	ComputeMode gpu.ComputeMode `json:"computeMode"`
	MIG         bool            `json:"mig"`
	// Dynamic says that the MIG mode may be changed.
	Dynamic bool `json:"dynamic"`
	// Partition is where one is or was made.
	Partition *partition.Address `json:"partition,omitempty"`
	// Pod is what may run with the device.
	Pod *podLeft `json:"pod,omitempty"`
}

// undoFile is where an undo is kept.
type undoFile string

func (f undoFile) read() (*undo, error) {
	data, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what an earlier run left: %w", err)
	}
	var u undo
	if err := json.Unmarshal(data, &u); err != nil {
		return nil, fmt.Errorf("read what an earlier run left: %s: %w", f, err)
	}
	return &u, nil
}

func (f undoFile) write(u *undo) error {
	data, err := json.Marshal(u)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(string(f)), 0o750); err != nil {
		return fmt.Errorf("write how to undo: %w", err)
	}
	if err := host.ReplaceFile(string(f), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write how to undo: %w", err)
	}
	return nil
}

func (f undoFile) remove() error { return host.RemoveFile(string(f)) }

// partitions makes and destroys partitions, and says who keeps one in use.
func (n *Node) partitions(hardware *nvml.Client) *partition.Lifecycle {
	return partition.New(hardware, &holder.Finder{Roots: n.Roots})
}

func (n *Node) undoFile() undoFile {
	return undoFile(filepath.Join(n.DataDir, "conformance", "undo.json"))
}

// undo puts a GPU back that this run, or an earlier one, has changed, and forgets that it has
// to.
func (n *Node) undo(ctx context.Context, hardware *nvml.Client) error {
	u, err := n.undoFile().read()
	if u == nil || err != nil {
		return err
	}
	if u.Pod != nil {
		if err := n.removePod(ctx, u.Pod); err != nil {
			return fmt.Errorf("remove the pod with a device of GPU %s (%s): %w", u.PCIAddress, n.undoFile(), err)
		}
	}
	if err := u.apply(ctx, hardware, n.partitions(hardware)); err != nil {
		return fmt.Errorf("undo what was done to GPU %s (%s): %w", u.PCIAddress, n.undoFile(), err)
	}
	return n.undoFile().remove()
}

// undoEarlier is undo for what an earlier run has left. Since then the GPU may have been
// exchanged, and what another one has at that address is nobody's to undo.
func (n *Node) undoEarlier(ctx context.Context, hardware *nvml.Client, gpus []gpu.GPU) error {
	u, err := n.undoFile().read()
	if u == nil || err != nil {
		return err
	}
	if err := u.check(gpus); err != nil {
		return fmt.Errorf("%w: nothing is undone; if that GPU has left this node, remove %s", err, n.undoFile())
	}
	return n.undo(ctx, hardware)
}

// check makes sure that the GPU is the one that was changed.
func (u *undo) check(gpus []gpu.GPU) error {
	i := slices.IndexFunc(gpus, func(g gpu.GPU) bool { return g.PCIAddress == u.PCIAddress })
	switch {
	case i < 0:
		return fmt.Errorf("an earlier run has changed GPU %s at %s, where none answers now", u.UUID, u.PCIAddress)
	case gpus[i].UUID != u.UUID:
		return fmt.Errorf("an earlier run has changed GPU %s at %s, where GPU %s is now", u.UUID, u.PCIAddress, gpus[i].UUID)
	}
	return nil
}

// apply puts the GPU back.
func (u *undo) apply(ctx context.Context, hardware *nvml.Client, partitions *partition.Lifecycle) error {
	if u.Partition != nil {
		if err := partitions.Remove(ctx, *u.Partition, u.Dynamic && !u.MIG); err != nil {
			return err
		}
	}
	if u.Dynamic {
		if err := hardware.SetMIGMode(ctx, u.PCIAddress, u.MIG); err != nil {
			return fmt.Errorf("set MIG mode to %t: %w", u.MIG, err)
		}
	}
	if u.MIG {
		return nil // such a GPU has no compute mode
	}
	if err := hardware.SetComputeMode(ctx, u.PCIAddress, u.UUID, u.ComputeMode); err != nil {
		return fmt.Errorf("set the compute mode to %s: %w", u.ComputeMode, err)
	}
	return nil
}
