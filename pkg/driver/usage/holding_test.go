// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestHoldings: what is an observer's is nobody's, two shares of a device that a claim has are
// one, so that no metric is there twice, and without a limit of one of them there is none.
func TestHoldings(t *testing.T) {
	t.Parallel()
	share := func(name string, limit int64) claim.LiveDevice {
		d := claim.LiveDevice{Device: name, PCIAddress: "A", Kind: device.MPS, GPU: "GPU-1", Resources: gpu.Resources{MemoryBytes: 100}}
		if limit > 0 {
			d.Limits = &claim.LiveLimits{MemoryBytes: limit}
		}
		return d
	}
	held := func(uid types.UID, name string, kind device.Kind, uuid string, limit int64) Holding {
		return Holding{Claim: claim.Ref{UID: uid}, Device: name, PCIAddress: "A", Kind: kind, UUID: uuid, MemoryLimitBytes: limit}
	}
	whole := share("w", 0)
	whole.Kind = device.Whole
	own := whole
	own.Limits = &claim.LiveLimits{MemoryBytes: 40}
	observer := whole
	observer.Kind, observer.Admin = device.Observer, true
	slice := whole
	slice.Kind, slice.Resources.MemoryBytes = device.Partition, 10
	slice.Partition = &claim.LivePartition{PartitionID: gpu.PartitionID{UUID: "MIG-1", InstanceID: 7}, Profile: "1g", Gone: true}
	got := holdingsOf([]claim.LiveClaim{
		{Claim: claim.Ref{UID: "u1"}, Devices: []claim.LiveDevice{share("a", 5), share("b", 7), share("a", 6), share("b", 0), observer}},
		{Claim: claim.Ref{UID: "u2"}, Devices: []claim.LiveDevice{share("a", 1)}},
		{Claim: claim.Ref{UID: "u3"}, Devices: []claim.LiveDevice{whole}},
		{Claim: claim.Ref{UID: "u4"}, Devices: []claim.LiveDevice{own}},
		{Claim: claim.Ref{UID: "u5"}, Devices: []claim.LiveDevice{slice}},
	})
	partition := held("u5", "w", device.Partition, "MIG-1", 10)
	partition.Partition = slice.Partition
	want := []Holding{
		held("u1", "a", device.MPS, "GPU-1", 11), held("u1", "b", device.MPS, "GPU-1", 0), held("u2", "a", device.MPS, "GPU-1", 1),
		held("u3", "w", device.Whole, "GPU-1", 100), held("u4", "w", device.Whole, "GPU-1", 100), partition,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
