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

// BenchmarkHundredNodes looks at 100 nodes of eight GPUs with partitions at random places.
func BenchmarkHundredNodes(b *testing.B) {
	f := fleettest.New(b)
	for n := range 100 {
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
	m := fleet.New(f.Snapshot, fleettest.Driver)
	for b.Loop() {
		r, err := Find(b.Context(), m, Options{Limit: defaultLimit})
		if err != nil || r.Unconfirmed > 0 {
			b.Fatal(err, r.Unconfirmed)
		}
	}
}
