// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	boards "github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/must"
)

// forShares visits every board with every number of clients, on all that can be shared
// by MPS: the undivided GPU, and a partition of each profile.
func forShares(t *testing.T, visit func(t *testing.T, board *boards.Board, d Device)) {
	t.Helper()
	for _, b := range testBoards(t) {
		board := must.Get(boards.Load(strings.TrimSuffix(b.name, "-mig")))(t)
		for _, minor := range []int{0, 1} { // 48 clients or 60
			node := *b.node
			node.CUDAVersion = gpu.Version{Major: 13, Minor: minor}
			for clients := 1; clients <= 60; clients++ {
				i := must.Get(NewInventory(&node, everythingShared(b.gpu(), clients)))(t)
				placed := map[string]bool{} // one placement of each profile is enough
				for _, d := range i.Devices() {
					if d.Kind != MPS || d.Partition != nil && placed[d.Partition.Profile.Name] {
						continue
					}
					if d.Partition != nil {
						placed[d.Partition.Profile.Name] = true
					}
					if d.Share.Clients > clients {
						t.Errorf("%s, %s: %d clients, want %d at most", b.name, d.Name, d.Share.Clients, clients)
					}
					visit(t, board, d)
				}
			}
		}
	}
}

// everythingShared shares the GPU and its partitions by MPS, and offers nothing else.
func everythingShared(g *gpu.GPU, clients int) Terms {
	offer := policy.Offer{MPS: mpsOf(clients)}
	if g.MIG != nil {
		shares := policy.PartitionShares{MPS: mpsOf(clients)}
		for _, p := range g.MIG.Profiles {
			shares.Profiles = append(shares.Profiles, p.Name)
		}
		offer.Partition = &policy.PartitionOffer{Profiles: []string{}, Shares: []policy.PartitionShares{shares}}
	}
	return Terms{Policy: &policy.Policy{Default: offer}}
}

// TestSharesFit: when each client has its context and has used up its limit, all of it is
// on the board at the same time, with what the driver and the MPS server have.
func TestSharesFit(t *testing.T) {
	visited := map[string]bool{}
	forShares(t, func(t *testing.T, board *boards.Board, d Device) {
		t.Helper()
		total, taken, context := board.Product.MemoryMiB, board.Product.ReservedMiB, board.MPS.ContextMiB
		if d.Partition != nil {
			total, taken = d.Partition.Profile.Resources.MemoryBytes/mib, board.MIG.ReservedMiBPerSlice*uint64(d.Partition.Profile.Slices)
			context = board.MPS.MIGContextMiB
		}
		s := d.Share
		taken += board.MPS.ServerMiB + uint64(s.Clients)*context
		what := fmt.Sprintf("%s, %s for %d clients", board.Name, d.Name, s.Clients)
		if left := inMiB(int64(total - taken)); s.MemoryBytes > left {
			t.Errorf("%s: %d MiB are offered, and there are %d", what, s.MemoryBytes/mib, left/mib)
		}
		n := int64(s.Clients)
		if s.DefaultMemoryBytes < mib || n*s.DefaultMemoryBytes > s.MemoryBytes || s.MemoryBytes-n*s.DefaultMemoryBytes >= n*mib {
			t.Errorf("%s: %d MiB for each, %d for all", what, s.DefaultMemoryBytes/mib, s.MemoryBytes/mib)
		}
		if s.MaxMemoryBytes != s.MemoryBytes || s.MemoryBytes%mib+s.MaxMemoryBytes%mib+s.DefaultMemoryBytes%mib != 0 {
			t.Errorf("%s: %d bytes for each, %d at most, %d for all", what, s.DefaultMemoryBytes, s.MaxMemoryBytes, s.MemoryBytes)
		}
		checkMemoryPolicy(t, what, capacitiesOf(d)["memory"], s)
		visited[board.Name+shortName(d.Name)] = true
	})
	if len(visited) < 13+9 {
		t.Errorf("only %d devices were seen", len(visited))
	}
}

// checkMemoryPolicy: what the scheduler may give to one claim is what can be a limit.
func checkMemoryPolicy(t *testing.T, what string, memory resourceapi.DeviceCapacity, s *Share) {
	t.Helper()
	p := memory.RequestPolicy
	ok := memory.Value.Value() == s.MemoryBytes && p.Default.Value() == s.DefaultMemoryBytes &&
		p.ValidRange.Min.Value() == mib && p.ValidRange.Max.Value() == s.MaxMemoryBytes
	if step := p.ValidRange.Step; step != nil {
		ok = ok && step.Value() == mib
	} else {
		ok = ok && s.MemoryBytes < 2*mib
	}
	if !ok {
		t.Errorf("%s: share %+v has the capacity %+v", what, s, memory)
	}
}

// TestAllocatorOlderShares: claims that were allocated when more memory was offered, by an
// earlier version or policy, keep what they have. Nothing is given out in its place, and
// what is free is what they leave.
func TestAllocatorOlderShares(t *testing.T) {
	const device = "gpu-0000-1b-00-0-mps"
	older := func(memory string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{
			Device: device, ShareID: new(uuid.NewUUID()), ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
				"shares": resource.MustParse("1"), "memory": resource.MustParse(memory), "smPercent": resource.MustParse("25"),
				"multiprocessors": resource.MustParse("0"), "copyEngines": resource.MustParse("0"), "decoders": resource.MustParse("0"),
				"encoders": resource.MustParse("0"), "jpegEngines": resource.MustParse("0"), "ofaEngines": resource.MustParse("0"),
			},
		}
	}
	// 78887 MiB are offered of the H100's 81559. They were 81047, for four claims 20261 each.
	for name, test := range map[string]struct {
		held []string
		// fits is what one more claim can have, more is too much.
		fits, more string
	}{
		"all of it":                    {[]string{"20261Mi", "20261Mi", "20261Mi", "20261Mi"}, "", "1Mi"},
		"all but one claim":            {[]string{"20261Mi", "20261Mi", "20261Mi"}, "18104Mi", "18105Mi"},
		"two claims, more than now is": {[]string{"41000Mi", "40047Mi"}, "", "1Mi"},
		"one claim, more than now is":  {[]string{"81047Mi"}, "", "1Mi"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 2)).ResourceSlices(testOptions))
			for _, memory := range test.held {
				s.keep(older(memory))
			}
			first := s.only(device, "gpu-0000-1b-00-0", "gpu-0000-1b-00-0-timeslice", "gpu-0000-1b-00-0-mig-1g10gb-6")
			for _, class := range []string{"gpu", "mig", "timeslice"} {
				expect.Same(t, first.clone().allocate(request(class, 1)), "", class+" beside shares")
			}
			expect.Same(t, first.clone().allocate(consuming(request("mps", 1), amounts{"memory": test.more})), "", test.more+" more")
			if test.fits != "" {
				expect.Same(t, first.clone().allocate(consuming(request("mps", 1), amounts{"memory": test.fits})), device, test.fits)
			}
			// Other GPUs are not concerned.
			expect.Same(t, s.clone().allocate(request("gpu", 1)), "gpu-0000-28-00-0", "the second GPU")
		})
	}
}
