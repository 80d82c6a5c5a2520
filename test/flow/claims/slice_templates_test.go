// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestSliceTemplates checks that kubectl gpu slices makes of a model what the driver prints on
// a simulated machine with such GPUs, in places and with UUIDs like those of the template.
func TestSliceTemplates(t *testing.T) {
	t.Parallel()
	compared := 0
	t.Cleanup(func() {
		if compared < 16 {
			t.Errorf("compared %d machines only", compared)
		}
	})
	for _, board := range catalog.Boards() {
		for _, like := range []template.Machine{{Model: board, Count: 2}, {Model: board, Count: 2, MIG: true}} {
			name := board
			if like.MIG {
				name += " with MIG mode on"
			}
			t.Run(name, func(t *testing.T) {
				if like.MIG && !fixedMode(t, board) {
					t.Skip("MIG mode is not for an administrator to set")
				}
				facts := must.Get(like.Facts())(t)
				n := harness.NewNode(t, board+"x2", func(m *machine.Machine) {
					for i := range m.GPUs {
						m.GPUs[i].PCIAddress, m.GPUs[i].UUID = facts.GPUs[i].PCIAddress, facts.GPUs[i].UUID
					}
					if like.MIG {
						harness.TurnMIGOn(m)
					}
				})
				text := must.Get(os.ReadFile(n.DefaultPolicy()))(t)
				p := must.Get(policy.Decode(text))(t)
				got, problems, err := like.Slices(template.Options{Driver: harness.DriverName, Node: harness.NodeName, Policy: p})
				if err != nil || len(problems) > 0 {
					t.Fatal(err, problems)
				}
				want := printedSlices(t, n, true)
				for i := range want {
					for _, d := range want[i].Spec.Devices {
						delete(d.Attributes, deviceattribute.StandardDeviceAttributePCIeRoot)
						delete(d.Attributes, deviceattribute.StandardDeviceAttributeNUMANode)
					}
				}
				if diff := cmp.Diff(want, got, quantities()); diff != "" {
					t.Errorf("slices (-printed by the driver +template):\n%s", diff)
				}
				compared++
			})
		}
	}
}

// fixedMode reports whether the MIG mode of a board is for an administrator to set.
func fixedMode(t *testing.T, board string) bool {
	t.Helper()
	b := must.Get(catalog.Load(board))(t)
	return b.MIG != nil && b.MIG.ResetToSwitch
}
