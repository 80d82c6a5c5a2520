//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const podResourcesSocket = "unix:///var/lib/kubelet/pod-resources/kubelet.sock"

// TestPodResources looks devices of pods up as dcgm-exporter does (docs/how-to/dcgm-exporter.md): the kubelet says which device of
// which pool a container has, and the pool's ResourceSlices say what that is. Whole GPUs are found by their UUID and partitions by
// that of their GPU and their profile; shares have types that dcgm-exporter does not know.
func TestPodResources(t *testing.T) {
	ns, gpus := reserve(t, 3)
	type found struct{ kind, uuid, profile string }
	want := map[string]found{
		"whole":     {kind: "gpu", uuid: gpus[0].UUID},
		"partition": {kind: "mig", uuid: gpus[1].UUID, profile: "1g.10gb"},
		"share":     {kind: "mps", uuid: gpus[2].UUID},
	}
	for name, r := range map[string]request{
		"whole": wholeGPU.on(gpus[0]), "partition": oneSlice.on(gpus[1]), "share": mpsShare("10Gi", 25).on(gpus[2]),
	} {
		apply(t, ns, claim(name, r, "")+podUsing(name, name))
	}
	for name := range want {
		waitRunning(t, ns, name)
	}
	published, err := publishedSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	devices := podDevices(t, ns)
	for name, w := range want {
		got := found{}
		for _, d := range devices[name] {
			a := attributesOf(published, d.GetPoolName(), d.GetDeviceName())
			got = found{kind: text(a["type"]), uuid: text(a["uuid"]), profile: text(a["profile"])}
			if got.kind == "mig" {
				got.uuid = text(a["parentUUID"])
			}
			if d.GetDriverName() != driverName {
				t.Errorf("pod %s has a device of driver %s", name, d.GetDriverName())
			}
		}
		if len(devices[name]) != 1 || got != w {
			t.Errorf("pod %s has %v, which is %+v; want %+v", name, devices[name], got, w)
		}
	}
	t.Logf("%d cases", len(want))
}

// podDevices asks the kubelet which devices of claims the pods of a namespace have.
func podDevices(t *testing.T, ns string) map[string][]*podresources.ClaimResource {
	t.Helper()
	conn, err := grpc.NewClient(podResourcesSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	list, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		t.Fatal(fmt.Errorf("asking the kubelet for the resources of pods: %w", err))
	}
	devices := map[string][]*podresources.ClaimResource{}
	for _, p := range list.GetPodResources() {
		for _, c := range p.GetContainers() {
			for _, r := range c.GetDynamicResources() {
				if p.GetNamespace() == ns {
					devices[p.GetName()] = append(devices[p.GetName()], r.GetClaimResources()...)
				}
			}
		}
	}
	return devices
}

// attributesOf are the attributes of a published device.
func attributesOf(published []resourceapi.ResourceSlice, pool, device string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			if s.Spec.Pool.Name == pool && d.Name == device {
				return d.Attributes
			}
		}
	}
	return nil
}

func text(a resourceapi.DeviceAttribute) string {
	if a.StringValue == nil {
		return ""
	}
	return *a.StringValue
}
