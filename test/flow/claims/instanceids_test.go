// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestUpperHalfFirst checks that claims get their places and the right device nodes where the driver numbers GPU instances from the
// upper half of the GPU on, as newer ones do.
func TestUpperHalfFirst(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1", func(m *machine.Machine) { m.GPUs[0].MIG.UpperHalfFirst() })
	p := n.Start(t)
	p.Ready(t)
	ids := map[harness.Place]int{
		{Profile: "1g.10gb", Start: 0}: 11, {Profile: "1g.10gb", Start: 1}: 12, {Profile: "2g.20gb", Start: 2}: 6, {Profile: "3g.40gb", Start: 4}: 1,
	}
	var claims []*drapb.Claim
	for at, id := range ids {
		claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, at.Profile, at.Start)}))
		if err := n.CheckPrepared(claim.GetUid(), p.MustPrepare(t, claim), 0, at); err != nil {
			t.Error(err)
		}
		g := n.Machine(t).GPUs[0]
		if in := at.Find(&g); in == nil || in.ID != id {
			t.Errorf("%v is %+v, want the id %d", at, in, id)
		}
		claims = append(claims, claim)
	}
	p.MustUnprepare(t, claims...)
	n.WantClean(t)
}
