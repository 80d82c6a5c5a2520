// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/partition"
)

// partitionable returns why the GPU cannot be partitioned here, if so.
func (n *Node) partitionable() string {
	g := n.subject.gpu
	switch {
	case g == nil:
		return n.subject.why
	case g.MIG == nil:
		return "the GPU has no MIG"
	case !g.MIG.Enabled && !g.MIG.Dynamic:
		return "the MIG mode is off, and changing it needs a reset of the GPU"
	}
	return ""
}

func checkMIGSwitch(ctx context.Context, n *Node) []Finding {
	const expected = "it is on, at once"
	if why := n.partitionable(); why != "" {
		return []Finding{Cannot(n.GPU, expected, "%s", why)}
	}
	g := n.subject.gpu
	if !g.MIG.Dynamic {
		return []Finding{Cannot(g.PCIAddress, expected, "changing it needs a reset of the GPU")}
	}
	took, err := keeping(ctx, n, "MIG mode on", undoOf(g, nil), func(ctx context.Context, hardware *nvml.Client) (time.Duration, error) {
		began := time.Now()
		err := hardware.SetMIGMode(ctx, g.PCIAddress, true)
		return time.Since(began), err
	})
	if err != nil {
		return []Finding{Failed(g.PCIAddress, expected, err).Because("claims for partitions of this GPU fail")}
	}
	return []Finding{Expect(g.PCIAddress, true, expected, "after "+took.Round(time.Millisecond).String())}
}

// created is how long a partition took.
type created struct {
	Create  time.Duration `json:"create"`
	Destroy time.Duration `json:"destroy"`
	UUID    string        `json:"uuid"`
	// InstanceID is the GPU instance's.
	InstanceID int `json:"instanceID"`
}

func checkPartitions(ctx context.Context, n *Node) []Finding {
	const expected = "created and destroyed at every placement"
	if why := n.partitionable(); why != "" {
		return []Finding{Cannot(n.GPU, expected, "%s", why)}
	}
	g := n.subject.gpu
	var findings []Finding
	for _, p := range g.MIG.Profiles {
		findings = append(findings, n.checkProfile(ctx, g, p, expected))
	}
	return findings
}

func (n *Node) checkProfile(ctx context.Context, g *gpu.GPU, p gpu.Profile, expected string) Finding {
	var creation, destruction time.Duration
	ids := map[int]int{} // by where the placement starts
	for _, placement := range p.Placements {
		at := partition.Address{PCIAddress: g.PCIAddress, ProfileID: p.ID, Placement: placement}
		question := fmt.Sprintf("create and destroy %s at %d:%d", p.Name, placement.Start, placement.Size)
		took, err := keeping(ctx, n, question, undoOf(g, &at), func(ctx context.Context, hardware *nvml.Client) (created, error) {
			return makePartition(ctx, n.partitions(hardware), g, at)
		})
		if err == nil && !strings.HasPrefix(took.UUID, "MIG-") {
			err = fmt.Errorf("its UUID is %q", took.UUID)
		}
		if err != nil {
			return Failed(p.Name, expected, fmt.Errorf("at %d:%d: %w", placement.Start, placement.Size, err)).
				Because("claims for this profile fail there")
		}
		creation, destruction = max(creation, took.Create), max(destruction, took.Destroy)
		ids[placement.Start] = took.InstanceID
	}
	var inOrder []int
	for _, start := range slices.Sorted(maps.Keys(ids)) {
		inOrder = append(inOrder, ids[start])
	}
	n.measuredOf(g).instanceIDs[p.Name] = inOrder
	return Expect(p.Name, true, expected, fmt.Sprintf("%d placements, created in at most %s, destroyed in at most %s",
		len(p.Placements), creation.Round(time.Millisecond), destruction.Round(time.Millisecond)))
}

func makePartition(ctx context.Context, lifecycle *partition.Lifecycle, g *gpu.GPU, at partition.Address) (created, error) {
	began := time.Now()
	live, err := lifecycle.Make(ctx, at, g.MIG.Dynamic)
	if err != nil {
		return created{}, err
	}
	took := created{Create: time.Since(began), UUID: live.UUID, InstanceID: live.InstanceID}
	began = time.Now()
	err = lifecycle.Remove(ctx, at, false)
	took.Destroy = time.Since(began)
	return took, err
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

const impossible = "not supported"

// smallestPartition returns the smallest profile of the GPU and the first place for it.
func smallestPartition(g *gpu.GPU) (gpu.Profile, partition.Address) {
	smallest := slices.MinFunc(g.MIG.Profiles, func(a, b gpu.Profile) int {
		return cmp.Or(cmp.Compare(a.Slices, b.Slices), cmp.Compare(a.Resources.MemoryBytes, b.Resources.MemoryBytes), cmp.Compare(a.ID, b.ID))
	})
	return smallest, partition.Address{PCIAddress: g.PCIAddress, ProfileID: smallest.ID, Placement: smallest.Placements[0]}
}

func checkPartitionMPS(ctx context.Context, n *Node) []Finding {
	const expected = "a client goes on; EXCLUSIVE_PROCESS is not supported"
	if why := n.partitionable(); why != "" {
		return []Finding{Cannot(n.GPU, expected, "%s", why)}
	}
	g := n.subject.gpu
	smallest, at := smallestPartition(g)
	got, err := changing(ctx, n, "MPS on "+smallest.Name, undoOf(g, &at), func(ctx context.Context, hardware *nvml.Client) (sliceMPS, error) {
		live, err := n.partitions(hardware).Make(ctx, at, g.MIG.Dynamic)
		if err != nil {
			return sliceMPS{}, err
		}
		return n.mpsOn(ctx, hardware, g, live.UUID)
	})
	if err != nil {
		return []Finding{Failed(smallest.Name, expected, err)}
	}
	contextMemory(&n.measuredOf(g).mps.MIGContextMiB, sliceLimit, got.TakenBytes)
	right := got.Client == goesOn && got.Exclusive == impossible
	return []Finding{Expect(smallest.Name, right, expected, fmt.Sprintf("the client %s; EXCLUSIVE_PROCESS: %s", got.Client, got.Exclusive)).
		Because("what the driver does about MPS shares of partitions rests on another behaviour")}
}

func (n *Node) mpsOn(ctx context.Context, hardware *nvml.Client, g *gpu.GPU, uuid string) (got sliceMPS, err error) {
	switch err := hardware.SetComputeMode(ctx, g.PCIAddress, uuid, gpu.ComputeExclusiveProcess); {
	case err == nil:
		got.Exclusive = "possible"
	case errors.Is(err, gpu.ErrNotSupported):
		got.Exclusive = impossible
	default:
		got.Exclusive = err.Error()
	}
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	// MPS must be gone before the partition goes.
	defer func() { err = errors.Join(err, l.clear(context.WithoutCancel(ctx))) }()
	if _, err := l.start(ctx, uuid); err != nil {
		return got, err
	}
	if _, err := l.command(ctx, fmt.Sprintf("set_device_pinned_mem_limit SERVER 0 %dM", sliceLimit)); err != nil {
		return got, err
	}
	events, err := l.probe(ctx, surroundings{namespaces: syscall.CLONE_NEWIPC}, probe.Options{FillUpTo: probe.Sizes{sliceLimit * mebibyte}})
	got.Client, got.TakenBytes = outcome(events, err), taken(events)
	return got, nil
}
