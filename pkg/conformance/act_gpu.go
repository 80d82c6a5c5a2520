// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
)

// undo says how a GPU was before the intrusive part, and what the intrusive part may have made. It is written
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
	// Runtime is the socket of that which may run a pod with the device.
	Runtime string `json:"runtime,omitempty"`

	// keep leaves the GPU in the MIG mode that an act has set, unless that fails.
	keep bool
}

// undoOf describes how the GPU is, with a partition that is going to be made.
func undoOf(g *gpu.GPU, a *partition.Address) *undo {
	return &undo{
		PCIAddress: g.PCIAddress, UUID: g.UUID, ComputeMode: gpu.ComputeDefault, MIG: inMIG(g), Dynamic: g.MIG != nil && g.MIG.Dynamic, Partition: a,
	}
}

// change runs an act that changes the GPU, and puts the GPU back.
func change[T any](q *inquiry, question string, u *undo, act live[T]) T {
	return do(q, Change, question, func(ctx context.Context, m *machine) (value T, err error) {
		if err := errors.Join(m.hardware.Open(ctx), m.writeUndo(u)); err != nil {
			return value, err
		}
		if value, err = act(ctx, m); err != nil || !u.keep {
			err = errors.Join(err, m.undo(ctx))
		}
		return value, err
	})
}

// undoFile is where an undo is kept.
func (m *machine) undoFile() string { return filepath.Join(m.DataDir, "conformance", "undo.json") }

// readUndo returns nil if there is nothing to undo.
func (m *machine) readUndo() (u *undo, err error) {
	data, err := os.ReadFile(m.undoFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &u)
	}
	if err != nil {
		return nil, fmt.Errorf("read what an earlier run left: %s: %w", m.undoFile(), err)
	}
	return u, nil
}

// writeUndo replaces the file in one piece: a run may be killed meanwhile.
func (m *machine) writeUndo(u *undo) error {
	data, err := json.Marshal(u)
	if err = errors.Join(err, os.MkdirAll(filepath.Dir(m.undoFile()), 0o750)); err == nil {
		err = host.ReplaceFile(m.undoFile(), append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write how to undo: %w", err)
	}
	return nil
}

// undo puts a GPU back that this run, or an earlier one, has changed, and forgets that it has
// to.
func (m *machine) undo(ctx context.Context) error {
	u, err := m.readUndo()
	if u == nil || err != nil {
		return err
	}
	if u.Runtime != "" {
		if err := m.removePod(ctx, u.Runtime); err != nil {
			return fmt.Errorf("remove the pod with a device of GPU %s (%s): %w", u.PCIAddress, m.undoFile(), err)
		}
	}
	if err := m.putBack(ctx, u); err != nil {
		return fmt.Errorf("undo what was done to GPU %s (%s): %w", u.PCIAddress, m.undoFile(), err)
	}
	return host.RemoveFile(m.undoFile())
}

// putBack undoes in the order that the hardware asks for: a GPU with a partition keeps its MIG
// mode, and one in MIG mode has no compute mode.
func (m *machine) putBack(ctx context.Context, u *undo) error {
	if err := m.hardware.Open(ctx); err != nil {
		return err
	}
	if u.Partition != nil {
		if err := m.partitions().Remove(ctx, *u.Partition); err != nil {
			return err
		}
	}
	if u.Dynamic {
		if err := m.hardware.SetMIGMode(ctx, u.PCIAddress, u.MIG); err != nil {
			return fmt.Errorf("set MIG mode to %t: %w", u.MIG, err)
		}
	}
	if u.MIG {
		return nil
	}
	return m.hardware.SetComputeMode(ctx, u.PCIAddress, u.UUID, u.ComputeMode)
}

// undoEarlier ends what an earlier run has left of MPS, and undoes what it did to a GPU. Since
// then the GPU may have been exchanged, and what another one has at that address is nobody's to
// undo.
func (m *machine) undoEarlier(ctx context.Context, gpus []gpu.GPU) error {
	swept := m.daemon.sweep(ctx)
	u, err := m.readUndo()
	if u == nil || err != nil {
		return errors.Join(swept, err)
	}
	if err := u.check(gpus); err != nil {
		return errors.Join(swept, fmt.Errorf("%w: nothing is undone; if that GPU has left this node, remove %s", err, m.undoFile()))
	}
	return errors.Join(swept, m.undo(ctx))
}

// check makes sure that the GPU is the one that was changed.
func (u *undo) check(gpus []gpu.GPU) error {
	now := "none answers"
	for _, g := range gpus {
		if g.PCIAddress == u.PCIAddress && g.UUID == u.UUID {
			return nil
		}
		if g.PCIAddress == u.PCIAddress {
			now = "GPU " + g.UUID + " is"
		}
	}
	return fmt.Errorf("an earlier run has changed GPU %s at %s, where %s now", u.UUID, u.PCIAddress, now)
}

// partitions makes and destroys partitions, and says who keeps one in use.
func (m *machine) partitions() *partition.Lifecycle {
	return partition.New(m.hardware, &holder.Finder{Roots: m.Roots})
}

// twoProcesses makes a context in one process, and another one in a second process, in compute
// mode EXCLUSIVE_PROCESS.
func (m *machine) twoProcesses(ctx context.Context, g *gpu.GPU) (string, error) {
	if err := m.hardware.SetComputeMode(ctx, g.PCIAddress, g.UUID, gpu.ComputeExclusiveProcess); err != nil {
		return "", err
	}
	m.daemon.mu.Lock()
	defer m.daemon.mu.Unlock()
	alone := surroundings{pipe: nowhere, ownMemory: true, device: g.UUID}
	first, err := m.daemon.hold(ctx, alone, probe.Options{Hold: true})
	if err != nil {
		return "", fmt.Errorf("the first process: %w", err)
	}
	events, err := m.daemon.run(ctx, alone, probe.Options{})
	_, endErr := first.Finish(ctx)
	return "the second process " + outcome(events, nil), errors.Join(err, endErr)
}

// created is how long a partition took.
type created struct {
	Create  time.Duration `json:"create"`
	Destroy time.Duration `json:"destroy"`
	UUID    string        `json:"uuid"`
	// InstanceID is the GPU instance's.
	InstanceID int `json:"instanceID"`
}

// makePartition makes a partition as the driver does for a claim, and removes it.
func (m *machine) makePartition(ctx context.Context, g *gpu.GPU, at partition.Address) (created, error) {
	lifecycle, began := m.partitions(), time.Now()
	live, err := lifecycle.Make(ctx, at, g.MIG.Dynamic)
	if err != nil {
		return created{}, err
	}
	took := created{Create: time.Since(began), UUID: live.UUID, InstanceID: live.InstanceID}
	began = time.Now()
	err = lifecycle.Remove(ctx, at)
	took.Destroy = time.Since(began)
	return took, err
}

// smallestPartition returns the smallest profile of the GPU and the first place for it.
func smallestPartition(g *gpu.GPU) (gpu.Profile, partition.Address) {
	smallest := slices.MinFunc(g.MIG.Profiles, func(a, b gpu.Profile) int {
		return cmp.Or(cmp.Compare(a.Slices, b.Slices), cmp.Compare(a.Resources.MemoryBytes, b.Resources.MemoryBytes), cmp.Compare(a.ID, b.ID))
	})
	return smallest, partition.Address{PCIAddress: g.PCIAddress, ProfileID: smallest.ID, Placement: smallest.Placements[0]}
}

// sliceMPS is what MPS does on a partition.
type sliceMPS struct {
	Client string `json:"client"`
	// Exclusive is what becomes of an attempt to make the partition EXCLUSIVE_PROCESS.
	Exclusive string `json:"exclusive"`
	// TakenBytes is what the client could take under a limit of sliceLimit.
	TakenBytes uint64 `json:"takenBytes"`
}

// sliceLimit is a limit of memory in MiB, which the smallest partitions have.
const sliceLimit = 2048

// impossible is what the driver takes for granted about compute modes of partitions.
const impossible = "not supported"

// mpsOn makes a partition and runs MPS on it.
func (m *machine) mpsOn(ctx context.Context, g *gpu.GPU, at partition.Address) (got sliceMPS, err error) {
	live, err := m.partitions().Make(ctx, at, g.MIG.Dynamic)
	if err != nil {
		return got, err
	}
	got.Exclusive = "possible"
	if err := m.hardware.SetComputeMode(ctx, g.PCIAddress, live.UUID, gpu.ComputeExclusiveProcess); errors.Is(err, gpu.ErrNotSupported) {
		got.Exclusive = impossible
	} else if err != nil {
		got.Exclusive = err.Error()
	}
	d := m.daemon
	d.mu.Lock()
	defer d.mu.Unlock()
	// MPS must be gone before the partition goes.
	defer func() { err = errors.Join(err, d.clear(context.WithoutCancel(ctx))) }()
	if _, err := d.start(ctx, live.UUID); err != nil {
		return got, err
	}
	if _, err := d.command(ctx, fmt.Sprintf("set_device_pinned_mem_limit SERVER 0 %dM", sliceLimit)); err != nil {
		return got, err
	}
	events, err := d.run(ctx, surroundings{namespaces: syscall.CLONE_NEWIPC}, probe.Options{FillUpTo: sliceLimit * mib})
	got.Client, got.TakenBytes = outcome(events, err), taken(events)
	return got, nil
}
