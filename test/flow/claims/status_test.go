// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// untilStatus waits until a claim's status has this condition of its only device, and returns it.
func untilStatus(t *testing.T, n *harness.Node, p *harness.Driver, claim *drapb.Claim, want string) (entry harness.StatusEntry) {
	t.Helper()
	p.Until(t, "the status of claim "+claim.GetName()+": "+want, func(context.Context) error {
		entries, err := n.Status(claim.GetNamespace(), claim.GetName())
		if err == nil && (len(entries) != 1 || entries[0].Ready != want) {
			err = fmt.Errorf("%+v", entries)
		}
		if err == nil {
			entry = entries[0]
		}
		return err
	})
	return entry
}

// mig returns the only partition of a GPU.
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
	const ready, lost = "True/Ready", "False/GPULost"
	n, p := harness.NewDriver(t, "h100x3", harness.ClaimStatusOn, "--poll-interval=100ms")
	partition, _ := p.NewClaim(t, n, harness.Partition(0, "2g.20gb", 2))
	whole, _ := p.NewClaim(t, n, harness.Device{GPU: 1})
	observer := allocateForAdmin(n, n.DeviceName(t, 1, "", 0)+"-observer")
	p.MustPrepare(t, observer)

	got := untilStatus(t, n, p, partition, ready).DeviceStatus
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
	if got := untilStatus(t, n, p, whole, ready); got.UUID != n.Machine(t).GPUs[1].UUID || got.ParentUUID != got.UUID || got.Type != "gpu" {
		t.Errorf("whole GPU: %+v", got)
	}

	fail := func(code int) {
		t.Helper()
		n.Update(t, func(m *machine.Machine) { m.GPUs[1].Failure = code })
	}
	fail(harness.NVMLGPUIsLost)
	untilStatus(t, n, p, whole, lost)
	untilStatus(t, n, p, observer, lost)
	untilStatus(t, n, p, partition, ready)
	fail(0)
	untilStatus(t, n, p, whole, ready)
	untilStatus(t, n, p, observer, ready)

	p.MustUnprepare(t, whole, observer)
	p.Kill()
	before, released := n.API.Claim(partition.GetNamespace(), partition.GetName()), n.API.Claim(whole.GetNamespace(), whole.GetName())
	fail(harness.NVMLGPUIsLost)
	p = n.Run(t, harness.ClaimStatusOn)
	second, _ := p.NewClaim(t, n, harness.Device{GPU: 2})
	untilStatus(t, n, p, second, ready)
	for _, claim := range []*resourceapi.ResourceClaim{before, released} {
		if diff := cmp.Diff(claim, n.API.Claim(claim.Namespace, claim.Name)); diff != "" {
			t.Errorf("a status that was right was written again, or one that is not the driver's any more (-before +after):\n%s", diff)
		}
	}
	p.MustUnprepare(t, partition, second)
	n.WantClean(t)
}

// TestDeviceMetadata: containers have a file about their devices; it survives the driver, and goes
// with the claim.
func TestDeviceMetadata(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x3", harness.DeviceMetadataOn)
	claim, ids := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
	if len(ids) != 2 || !strings.HasPrefix(ids[1], harness.DriverName+"/metadata=") {
		t.Fatalf("CDI ids %v", ids)
	}
	check := func(when string) {
		t.Helper()
		read, err := harness.ReadMetadata(n.Container(t, ids...), claim.GetName(), "r0")
		if err != nil || len(read.Requests) != 1 || len(read.Requests[0].Devices) != 1 {
			t.Fatalf("%s: %+v, %v", when, read, err)
		}
		d := read.Requests[0].Devices[0]
		text := func(name resourceapi.QualifiedName) string {
			return ptr.Deref(d.Attributes[name].StringValue, "nothing")
		}
		if text("uuid") != mig(t, n, 0).Compute[0].UUID || text("parentUUID") != n.Machine(t).GPUs[0].UUID || text("type") != "mig" ||
			d.Attributes["gpuInstanceID"].IntValue == nil || d.Attributes["driverVersion"].VersionValue == nil {
			t.Errorf("%s: %+v", when, read)
		}
	}
	check("prepared")

	// After a reboot the kubelet has the claim prepared again, with another partition.
	p.Kill()
	n.Reboot(t)
	p = n.Run(t, harness.DeviceMetadataOn)
	expect.Same(t, p.MustPrepare(t, claim), ids, "CDI ids after the reboot")
	check("after a reboot")

	// A driver that does not write such files leaves those of containers that have them.
	p.Kill()
	p = n.Run(t)
	check("switched off")

	p.Kill()
	p = n.Run(t, harness.DeviceMetadataOn)
	p.MustUnprepare(t, claim)
	expect.Len(t, harness.List(t, filepath.Join(n.DataDir(), "dra-device-metadata")), 0, "left")
	n.WantClean(t)
}

// TestErrorsNameNoOtherTenant: what is in the way of a claim, the kubelet is told without the claims, pods, processes and UIDs of other
// namespaces, and the log has them. The kubelet puts it into an event of the pod.
func TestErrorsNameNoOtherTenant(t *testing.T) {
	// Not in parallel: its program, in a pod without a claim, has a node open that the GPUs of other machines have, too.
	n, p := harness.NewDriver(t, "h100x4")
	var secrets []string
	victim := func(d harness.Device) *drapb.Claim {
		c := n.Allocate(t, []harness.Device{d})
		stored := n.API.Claim(c.GetNamespace(), c.GetName())
		n.API.DeleteClaim(c.GetNamespace(), c.GetName())
		stored.Namespace, stored.Name, c.Namespace, c.Name = "victim", "secret", "victim", "secret"
		n.API.SetClaim(stored)
		secrets = append(secrets, c.GetUid())
		p.MustPrepare(t, c)
		return c
	}
	victim(harness.Device{GPU: 0})
	for range 4 {
		victim(harness.Device{GPU: 1, Kind: harness.TimeSlice})
	}
	ended := victim(harness.Device{GPU: 2})
	program := must.Get(n.StartReady(t.Context(), t, n.Container(t, p.MustPrepare(t, ended)...), "hold", "--memory=1Gi"))(t)
	pod := uuid.NewUUID()
	program.InPod(t, pod)
	p.MustUnprepare(t, ended)
	n.DamageRecords(t, victim(harness.Device{GPU: 3}).GetUid(), harness.CutOff)
	secrets = append(secrets, "victim", "secret", string(pod), "cuda-client")

	var claims []*drapb.Claim
	want := []string{
		"prepared for a claim of another namespace", "all are taken, one of them by a claim of another namespace",
		"for a claim of another namespace and is in use: a process of a pod that is not named here", "(what the driver's log names)",
	}
	for gpu := range want {
		d := harness.Device{GPU: gpu}
		if gpu == 1 {
			d.Kind = harness.TimeSlice
		}
		claims = append(claims, n.Allocate(t, []harness.Device{d}))
	}
	for i, answer := range p.Prepare(t, claims...) {
		got := answer.GetError()
		expect.Contains(t, got, want[i], "GPU", i)
		for _, secret := range secrets {
			if strings.Contains(got, secret) {
				t.Errorf("GPU %d: the error names %s: %s", i, secret, got)
			}
		}
	}
	for _, secret := range secrets {
		p.WantLog(t, secret)
	}
	program.Stop()
}
