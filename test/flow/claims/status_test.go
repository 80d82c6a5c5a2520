// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// untilStatus waits until a claim's status is as wanted, and returns it.
func untilStatus(t *testing.T, n *harness.Node, p *harness.Driver, claim *drapb.Claim, want string, check func([]harness.StatusEntry) bool) []harness.StatusEntry {
	t.Helper()
	var entries []harness.StatusEntry
	p.Until(t, "the status of claim "+claim.GetName()+": "+want, func(context.Context) error {
		var err error
		if entries, err = n.Status(claim.GetNamespace(), claim.GetName()); err != nil {
			return err
		}
		if !check(entries) {
			return fmt.Errorf("%+v", entries)
		}
		return nil
	})
	return entries
}

// mig returns the UUID of the only partition of a GPU.
func mig(t *testing.T, n *harness.Node, gpu int) machine.GPUInstance {
	t.Helper()
	instances := n.Machine(t).GPUs[gpu].MIG.Instances
	if len(instances) != 1 || len(instances[0].Compute) != 1 {
		t.Fatalf("GPU %d has the instances %+v, want one", gpu, instances)
	}
	return instances[0]
}

// TestClaimStatus: the status says which partition a claim has and which GPU; it follows a lost
// GPU; after a restart it is still right, and nothing is said of what was released meanwhile.
func TestClaimStatus(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x3")
	p := n.Start(t, harness.ClaimStatusOn, "--poll-interval=100ms")
	p.Ready(t)
	partition := n.AllocateNamed([]string{harness.DeviceName(n.Address(t, 0), harness.Place{Profile: "2g.20gb", Start: 2})})
	whole := n.AllocateNamed([]string{harness.DeviceName(n.Address(t, 1), harness.Place{})})
	p.MustPrepare(t, partition)
	p.MustPrepare(t, whole)

	ready := func(e []harness.StatusEntry) bool { return len(e) == 1 && e[0].Ready == "True/Ready" }
	lost := func(e []harness.StatusEntry) bool { return len(e) == 1 && e[0].Ready == "False/GPULost" }
	got := untilStatus(t, n, p, partition, "ready", ready)[0].DeviceStatus
	instance := mig(t, n, 0)
	ci := instance.Compute[0]
	want := api.DeviceStatus{
		Type: "mig", UUID: ci.UUID, ParentUUID: n.Machine(t).GPUs[0].UUID, PCIBusID: n.Address(t, 0),
		MIG: &api.MIGStatus{
			Profile: "2g.20gb", Placement: api.PlacementStatus{Start: 2, Size: 2}, GPUInstanceID: new(instance.ID), ComputeInstanceID: new(ci.ID),
		},
	}
	want.TypeMeta = got.TypeMeta
	if diff := cmp.Diff(want, got); diff != "" || got.APIVersion != api.StatusVersion {
		t.Errorf("partition (-want +got):\n%s", diff)
	}
	if got := untilStatus(t, n, p, whole, "ready", ready)[0]; got.UUID != n.Machine(t).GPUs[1].UUID || got.ParentUUID != got.UUID || got.Type != "gpu" {
		t.Errorf("whole GPU: %+v", got)
	}

	n.Update(t, func(m *machine.Machine) { m.GPUs[1].Failure = harness.NVMLGPUIsLost })
	untilStatus(t, n, p, whole, "lost", lost)
	untilStatus(t, n, p, partition, "ready", ready)
	n.Update(t, func(m *machine.Machine) { m.GPUs[1].Failure = 0 })
	untilStatus(t, n, p, whole, "ready again", ready)

	p.MustUnprepare(t, whole)
	p.Kill()
	before, released := n.API.Claim(partition.GetNamespace(), partition.GetName()), n.API.Claim(whole.GetNamespace(), whole.GetName())
	n.Update(t, func(m *machine.Machine) { m.GPUs[1].Failure = harness.NVMLGPUIsLost })
	p = n.Start(t, harness.ClaimStatusOn)
	p.Ready(t)
	second := n.AllocateNamed([]string{harness.DeviceName(n.Address(t, 2), harness.Place{})})
	p.MustPrepare(t, second)
	untilStatus(t, n, p, second, "ready", ready)
	for _, claim := range []*resourceapi.ResourceClaim{before, released} {
		if diff := cmp.Diff(claim, n.API.Claim(claim.Namespace, claim.Name)); diff != "" {
			t.Errorf("a status that was right was written again, or one that is not the driver's any more (-before +after):\n%s", diff)
		}
	}
	p.MustUnprepare(t, partition, second)
	n.WantClean(t)
}

// readMetadata reads what programs in a container can know of the device of a claim's only
// request.
func readMetadata(t *testing.T, n *harness.Node, claim *drapb.Claim, ids []string) *metadata.DeviceMetadata {
	t.Helper()
	read, err := harness.ReadMetadata(n.Container(t, ids...), claim.GetName(), "r0")
	if err != nil {
		t.Fatal(err)
	}
	return read
}

// TestDeviceMetadata: containers have a file about their devices; it survives the driver, and goes
// with the claim.
func TestDeviceMetadata(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x3")
	p := n.Start(t, harness.DeviceMetadataOn)
	p.Ready(t)
	name := harness.DeviceName(n.Address(t, 0), harness.Place{Profile: "1g.10gb", Start: 4})
	claim := n.AllocateNamed([]string{name})
	ids := p.MustPrepare(t, claim)
	if len(ids) != 2 || !strings.HasPrefix(ids[1], harness.DriverName+"/metadata=") {
		t.Fatalf("CDI ids %v", ids)
	}
	check := func(when string) {
		t.Helper()
		read := readMetadata(t, n, claim, ids)
		if len(read.Requests) != 1 || len(read.Requests[0].Devices) != 1 {
			t.Fatalf("%s: %+v", when, read)
		}
		d := read.Requests[0].Devices[0]
		text := func(name resourceapi.QualifiedName) string {
			if value := d.Attributes[name].StringValue; value != nil {
				return *value
			}
			return "nothing"
		}
		if d.Name != name || text("uuid") != mig(t, n, 0).Compute[0].UUID || text("parentUUID") != n.Machine(t).GPUs[0].UUID || text("type") != "mig" {
			t.Errorf("%s: %+v", when, read)
		}
		if d.Attributes["gpuInstanceID"].IntValue == nil || d.Attributes["driverVersion"].VersionValue == nil {
			t.Errorf("%s: %+v", when, d.Attributes)
		}
	}
	check("prepared")

	// After a reboot the kubelet has the claim prepared again, with another partition.
	p.Kill()
	n.Reboot(t)
	p = n.Start(t, harness.DeviceMetadataOn)
	p.Ready(t)
	if again := p.MustPrepare(t, claim); !slices.Equal(again, ids) {
		t.Errorf("CDI ids %v, before the reboot %v", again, ids)
	}
	check("after a reboot")

	// A driver that does not write such files leaves those of containers that have them.
	p.Kill()
	p = n.Start(t)
	p.Ready(t)
	check("switched off")

	p.Kill()
	p = n.Start(t, harness.DeviceMetadataOn)
	p.Ready(t)
	p.MustUnprepare(t, claim)
	left, err := os.ReadDir(filepath.Join(n.PluginsDir, harness.DriverName, "dra-device-metadata"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	n.WantClean(t)
}

// TestClaimStatusOfShares: each claim's status has its own share, with its limits and those of
// the hardware, and the loss of the server that they have in common.
func TestClaimStatusOfShares(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t, harness.ClaimStatusOn, harness.DeviceMetadataOn, "--poll-interval=100ms")
	p.Ready(t)
	gpu := n.Machine(t).GPUs[0]
	var claims []*drapb.Claim
	for _, percent := range []int{10, 25} {
		claim := n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS, Memory: 3 << 30, Percent: percent}})
		ids := p.MustPrepare(t, claim)
		claims = append(claims, claim)
		want := &api.LimitsStatus{MemoryBytes: 3 << 30, SMPercent: percent, Multiprocessors: map[int]int{10: 12, 25: 32}[percent], EffectiveSMPercent: map[int]int{10: 9, 25: 24}[percent]}
		got := untilStatus(t, n, p, claim, "ready", func(e []harness.StatusEntry) bool { return len(e) == 1 && e[0].Ready == "True/Ready" })[0]
		if diff := cmp.Diff(want, got.Limits); diff != "" || got.UUID != gpu.UUID || got.Type != "mps" || got.MPS == nil || got.MPS.ClientPriority != api.PriorityNormal {
			t.Errorf("%d%%: %+v (-want +got):\n%s", percent, got, diff)
		}
		stored := n.API.Claim(claim.GetNamespace(), claim.GetName())
		if share := stored.Status.Devices[0].ShareID; share == nil || *share != string(*stored.Status.Allocation.Devices.Results[0].ShareID) {
			t.Errorf("%d%%: share %v", percent, share)
		}
		d := readMetadata(t, n, claim, ids).Requests[0].Devices[0]
		if m := d.Attributes["multiprocessors"].IntValue; m == nil || *m != int64(want.Multiprocessors) {
			t.Errorf("%d%%: metadata %+v", percent, d.Attributes)
		}
	}
	if err := n.KillMPS(); err != nil {
		t.Fatal(err)
	}
	for _, claim := range claims {
		untilStatus(t, n, p, claim, "a lost server", func(e []harness.StatusEntry) bool {
			return len(e) == 1 && e[0].Ready == "True/Ready" && e[0].MPS != nil && e[0].MPS.ServersLost > 0
		})
	}
	p.MustUnprepare(t, claims...)
}
