// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestInstanceIDOrders: which id an instance has depends on its place, and on which half of the GPU the driver numbers first.
func TestInstanceIDOrders(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*machine.MIG)
		want   []string
	}{
		"lower half first": {func(*machine.MIG) {}, []string{
			"1g.10gb: 0→7 1→8 2→9 3→10 4→11 5→12 6→13", "1g.20gb: 0→3 2→4 4→5 6→6", "2g.20gb: 0→3 2→4 4→5",
			"3g.40gb: 0→1 4→2", "4g.40gb: 0→1", "7g.80gb: 0→0",
		}},
		"upper half first": {(*machine.MIG).UpperHalfFirst, []string{
			"1g.10gb: 0→11 1→12 2→13 3→14 4→7 5→8 6→9", "1g.20gb: 0→5 2→6 4→3 6→4", "2g.20gb: 0→5 2→6 4→3",
			"3g.40gb: 0→2 4→1", "4g.40gb: 0→2", "7g.80gb: 0→0",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := catalog.Machine("h100-80-sxmx1", catalog.Options{})
			if err != nil {
				t.Fatal(err)
			}
			test.change(m.GPUs[0].MIG)
			d := device(t, newRoot(t, m).open(), 0)
			enable(t, d)
			var got []string
			for _, p := range m.GPUs[0].MIG.Profiles {
				if p.Enum == nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1 {
					continue // as 1g.10gb
				}
				line := p.Name + ":"
				for _, at := range p.Placements {
					gi := createAt(t, d, p.ID, place(uint32(at.Start), uint32(at.Size)))
					info, ret := gi.GetInfo()
					wants(t, "GetInfo", ret, nvml.SUCCESS)
					line += fmt.Sprintf(" %d→%d", at.Start, info.Id)
					wants(t, "Destroy", gi.Destroy(), nvml.SUCCESS)
				}
				got = append(got, line)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("ids (-want +got):\n%s", diff)
			}
		})
	}
}
