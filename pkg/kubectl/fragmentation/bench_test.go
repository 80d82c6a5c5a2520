// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/fleettest"
)

// BenchmarkFind looks at nodes of eight GPUs with partitions at random places: hardly two GPUs
// are in the same state.
func BenchmarkFind(b *testing.B) {
	for _, nodes := range []int{100, 500} {
		m := scattered(b, nodes)
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			for b.Loop() {
				r, err := Find(b.Context(), m, Options{Limit: defaultLimit})
				if err != nil || r.Unconfirmed > 0 {
					b.Fatal(err, r.Unconfirmed)
				}
			}
		})
	}
}

// scattered returns a fleet whose partitions are where chance put them.
func scattered(tb testing.TB, nodes int) *fleet.Model {
	tb.Helper()
	f := fleettest.New(tb)
	for n := range nodes {
		f.AddNode(fmt.Sprintf("node-%03d", n), "h100-80-sxm", 8)
	}
	random := rand.New(rand.NewPCG(1, 1)) // #nosec G404 -- the same states each time
	for _, n := range fleet.New(f.Snapshot, fleettest.Driver).Nodes {
		for i, g := range n.GPUs {
			left := newBoard(g).left(nil)
			for _, at := range random.Perm(len(g.Devices))[:random.IntN(20)] {
				if d := g.Devices[at]; d.Type == fleet.TypeMIG && left.fit(d) {
					left.take(d, 1)
					take(f, fmt.Sprintf("claim-%s-%d-%d", n.Name, i, at), n.Name, random.IntN(4) > 0, d.Name)
				}
			}
		}
	}
	return fleet.New(f.Snapshot, fleettest.Driver)
}
