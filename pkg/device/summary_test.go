// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// TestAllocatableMemory checks on all boards that it is the whole GPU where that is offered,
// and otherwise the best of all legal layouts, which is never more than the GPU has.
func TestAllocatableMemory(t *testing.T) {
	t.Parallel()
	for _, b := range testBoards(t) {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			checkAllocatable(t, b.node)
		})
	}
}

func checkAllocatable(t *testing.T, node *gpu.Node) {
	t.Helper()
	whole := inventoryOf(t, node, Terms{})
	for _, s := range whole.Summaries() {
		if has := s.GPU.Resources.MemoryBytes; s.AllocatableBytes > has || s.AllocatableBytes == 0 {
			t.Errorf("of %d bytes %d can be allocated", has, s.AllocatableBytes)
		} else if _, whole := possibleKinds(s.GPU); !whole && s.AllocatableBytes != has {
			t.Errorf("of a GPU that is offered whole %d can be allocated, it has %d", s.AllocatableBytes, has)
		}
	}
	for _, offer := range []string{"{kinds: [mig]}", "{kinds: [mig], mig: {variants: true}}"} {
		partitions, _ := problemsOf(t, node, decoded(t, "default: "+offer))
		checkLayouts(t, partitions)
	}
}

// checkLayouts compares with all legal layouts of published partitions.
func checkLayouts(t *testing.T, partitions *Inventory) {
	t.Helper()
	for _, s := range partitions.Summaries() {
		if s.GPU.MIG == nil || len(s.Devices) == 0 {
			continue
		}
		offered := map[gpu.Placement]map[uint32]bool{}
		for _, d := range s.Devices {
			if offered[d.Partition.Placement] == nil {
				offered[d.Partition.Placement] = map[uint32]bool{}
			}
			offered[d.Partition.Placement][d.Partition.Profile.ID] = true
		}
		var best, sum uint64
		visitLegal(s.GPU.MIG, func(layout []PartitionShape) {
			var memory uint64
			for _, p := range layout {
				if !offered[p.Placement][p.Profile.ID] {
					return
				}
				memory += p.Profile.Resources.MemoryBytes
			}
			best = max(best, memory)
		})
		for _, d := range s.Devices {
			sum += d.Partition.Profile.Resources.MemoryBytes
		}
		if s.AllocatableBytes != best || s.AllocatableBytes >= sum {
			t.Errorf("%d bytes of partitions can be allocated, want %d, of %d in all devices", s.AllocatableBytes, best, sum)
		}
	}
}

// TestAllocatableShares: overcommitted memory is still there once.
func TestAllocatableShares(t *testing.T) {
	t.Parallel()
	inventory := inventoryOf(t, loadNode(t, "h100-80-sxm"), decoded(t, "default: {kinds: [timeslice], timeslice: {clients: 4, memoryOvercommit: 3}}"))
	for _, s := range inventory.Summaries() {
		if s.AllocatableBytes != s.GPU.Resources.MemoryBytes {
			t.Errorf("got %d, want %d", s.AllocatableBytes, s.GPU.Resources.MemoryBytes)
		}
	}
}

func decoded(t *testing.T, text string) Terms {
	t.Helper()
	p, err := policy.Decode([]byte("apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n" + text))
	if err != nil {
		t.Fatal(err)
	}
	return Terms{Policy: p}
}
