// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/must"
)

// testOptions publish everything, as a cluster with default gates has it.
var testOptions = Options{Driver: "gpu.nvidia.com", Pool: "node-1", NodeName: "node-1", PartitionableDevices: true, ConsumableCapacity: true}

// testBoard is one GPU model in one MIG mode.
type testBoard struct {
	name string
	node *gpu.Node
}

func (b testBoard) gpu() *gpu.GPU { return &b.node.GPUs[0] }

// testBoards reads the facts about all boards, one GPU each. A board whose
// MIG mode is fixed comes twice: as it is, and as NAME-mig with the mode on.
func testBoards(t *testing.T) []testBoard {
	t.Helper()
	names := boards.Names()
	if len(names) < 18 {
		t.Fatalf("only %d boards", len(names))
	}
	var all []testBoard
	for _, name := range names {
		node := loadNode(t, name)
		all = append(all, testBoard{name, node})
		if mig := node.GPUs[0].MIG; mig != nil && !mig.Dynamic {
			all = append(all, testBoard{name + "-mig", loadNode(t, name+"-mig")})
		}
	}
	return all
}

// partitionable are the boards that publish partitions.
func partitionable(t *testing.T) []testBoard {
	t.Helper()
	var boards []testBoard
	for _, b := range testBoards(t) {
		if _, partitions := possibleKinds(b.gpu()); partitions {
			boards = append(boards, b)
		}
	}
	return boards
}

// loadNode is a node with one GPU. NAME-mig has the mode on.
func loadNode(t testing.TB, board string) *gpu.Node {
	t.Helper()
	name, on := strings.CutSuffix(board, "-mig")
	node := must.Get(boards.Load(name))(t)
	if on {
		node.GPUs[0].MIG.Enabled = true
	}
	return node
}

// replicate is a node with n GPUs of one board. They are listed against the
// order of their addresses.
func replicate(node *gpu.Node, n int) *gpu.Node {
	out := *node
	out.GPUs = nil
	for i := n - 1; i >= 0; i-- {
		g := node.GPUs[0]
		bus := 0x1b + 0x0d*i // 16 of them stay below 0x100
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", bus)
		g.PCIeRoot = fmt.Sprintf("pci0000:%02x", bus-5)
		g.UUID = fmt.Sprintf("%s%02d", g.UUID[:len(g.UUID)-2], i)
		g.Minor = i
		numa := i / 8
		g.NUMANode = &numa
		out.GPUs = append(out.GPUs, g)
	}
	return &out
}

// everything offers all that a GPU can be: what the policy offers by default, and the
// variants of profiles.
var everything = offering(func(*policy.Offer) {})

func mustInventory(t *testing.T, node *gpu.Node) *Inventory {
	t.Helper()
	return inventoryOf(t, node, everything)
}

func names(devices []Device) []string {
	var out []string
	for _, d := range devices {
		out = append(out, d.Name)
	}
	return out
}

// devicesOf are the devices of all slices in order, without observers.
func devicesOf(published []resourceapi.ResourceSlice) []resourceapi.Device {
	var out []resourceapi.Device
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			if *d.Attributes["type"].StringValue != string(Observer) {
				out = append(out, d)
			}
		}
	}
	return out
}
