// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestAllSharesAtTheirLimits checks on each board that all claims that can share it, and
// one of its smallest partitions, use all that they were given at the same time. MPS counts
// contexts against limits, as NVIDIA documents; there is room for them all the same, since
// published figures show that it counts a part of them only.
func TestAllSharesAtTheirLimits(t *testing.T) {
	t.Parallel()
	for _, board := range catalog.Boards() {
		t.Run(board, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, board+"x1")
			n.StartSupervisor(t)
			g := &n.Machine(t).GPUs[0]
			places := []harness.Device{{Kind: harness.MPS}}
			if g.MIG != nil && !g.MIG.ResetToSwitch {
				places = append(places, smallestPartition(g))
			}
			var flags []string
			if profile := places[len(places)-1].Profile; profile != "" {
				flags = append(flags, n.Policy(t, fmt.Sprintf("default: {mig: {shares: [{profiles: [%s], mps: {}}]}}\n", profile)))
			}
			p := n.Run(t, flags...)
			for _, place := range places {
				fill(t, n, p, place)
			}
			p.UntilClean(t, n)
		})
	}
}

func smallestPartition(g *machine.GPU) harness.Device {
	p := slices.MinFunc(g.MIG.Profiles, func(a, b machine.GIProfile) int { return int(a.MemoryMiB) - int(b.MemoryMiB) })
	return harness.Device{Kind: harness.MPS, Profile: p.Name, Start: p.Placements[0].Start}
}

// fill gives out all shares of a device, and has each of them used up.
func fill(t *testing.T, n *harness.Node, p *harness.Driver, place harness.Device) {
	t.Helper()
	name := n.DeviceName(t, 0, place.Profile, place.Start) + "-mps"
	published, found := n.Published()[name]
	if !found {
		t.Fatalf("%s is not published", name)
	}
	each, clients := defaultOf(published, "memory"), int(valueOf(published, "shares"))
	g := &n.Machine(t).GPUs[0]
	context := g.ContextBytes
	if place.Profile != "" {
		context = g.MIG.ContextBytes
	}
	place.Memory, place.Percent = each, 100/clients
	alloc := fmt.Sprintf("%dMi", (uint64(each)-context)>>20)
	var claims []*drapb.Claim
	var users []*harness.Program
	for range clients {
		c := n.Allocate(t, []harness.Device{place})
		user, err := n.TryStartProgram(t.Context(), t, n.Container(t, p.MustPrepare(t, c)...), "--memory="+alloc)
		must.Do(t, err, name, len(users), clients, "programs can have", alloc)
		claims, users = append(claims, c), append(users, user)
	}
	// The same with contexts that do not count against limits.
	var used uint64
	for _, process := range n.Machine(t).Processes {
		used += process.MemoryBytes
	}
	total := g.MemoryBytes - g.ReservedBytes
	if place.Profile != "" {
		i := slices.IndexFunc(g.MIG.Profiles, func(p machine.GIProfile) bool { return p.Name == place.Profile })
		total = (g.MIG.Profiles[i].MemoryMiB - g.MIG.Profiles[i].ReservedMiB) << 20
	}
	if all := used + uint64(clients)*context; used < uint64(each)*uint64(clients) || all > total {
		t.Errorf("%s: %d programs with %d MiB each use %d MiB, %d with contexts, of %d", name, clients, each>>20, used>>20, all>>20, total>>20)
	}
	for _, user := range users {
		expect.Do(t, user.Check(), name)
		user.Stop()
	}
	p.MustUnprepare(t, claims...)
}

func valueOf(d resourceapi.Device, capacity resourceapi.QualifiedName) int64 {
	value := d.Capacity[capacity].Value
	return value.Value()
}

func defaultOf(d resourceapi.Device, capacity resourceapi.QualifiedName) int64 {
	return d.Capacity[capacity].RequestPolicy.Default.Value()
}
