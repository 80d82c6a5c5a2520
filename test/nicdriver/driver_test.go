// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nicdriver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// node makes sysfs with a network card and another device on one switch.
func node(t *testing.T) string {
	t.Helper()
	sys := t.TempDir()
	for address, files := range map[string]map[string]string{
		"0000:19:00.0": {"class": "0x020000\n", "numa_node": "1\n"},
		"0000:1a:00.0": {"class": "0x030200\n", "numa_node": "1\n"},
	} {
		path := "devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/" + address
		for name, content := range files {
			full := filepath.Join(sys, path, name)
			if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(full, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		link := filepath.Join(sys, "bus/pci/devices", address)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("../../../"+path, link); err != nil {
			t.Fatal(err)
		}
	}
	return sys
}

func TestDiscover(t *testing.T) {
	got, err := Discover(node(t))
	if err != nil {
		t.Fatal(err)
	}
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	numa := int64(1)
	want := []resourceapi.Device{{Name: "nic-0000-19-00-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"resource.kubernetes.io/pciBusID": text("0000:19:00.0"),
		"resource.kubernetes.io/pcieRoot": text("pci0000:16"),
		"resource.kubernetes.io/numaNode": {IntValue: &numa},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// TestPrepare: a container runtime finds what the driver wrote, until the claim is unprepared.
func TestPrepare(t *testing.T) {
	driver := &Driver{CDIDir: t.TempDir()}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{UID: "u1"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "gpu", Driver: "gpu.nvidia.com", Pool: "n1", Device: "gpu-0000-1a-00-0"},
				{Request: "nic", Driver: Name, Pool: "n1", Device: "nic-0000-19-00-0"},
			},
		}}},
	}
	for range 2 { // the kubelet may ask again
		results, err := driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
		if err != nil {
			t.Fatal(err)
		}
		want := map[types.UID]kubeletplugin.PrepareResult{"u1": {Devices: []kubeletplugin.Device{{
			Requests: []string{"nic"}, PoolName: "n1", DeviceName: "nic-0000-19-00-0", CDIDeviceIDs: []string{cdiKind + "=u1-nic-0000-19-00-0"},
		}}}}
		if diff := cmp.Diff(want, results); diff != "" {
			t.Errorf("results (-want +got):\n%s", diff)
		}
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(driver.CDIDir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	device := cache.GetDevice(cdiKind + "=u1-nic-0000-19-00-0")
	if device == nil {
		t.Fatalf("no CDI device: %v", cache.GetErrors())
	}
	if diff := cmp.Diff([]string{"NIC_0000_19_00_0=0000:19:00.0"}, device.ContainerEdits.Env); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
	if prepared, err := driver.Prepared(); !prepared || err != nil {
		t.Errorf("prepared: %v, %v", prepared, err)
	}
	for range 2 {
		results, err := driver.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: "u1"}})
		if err != nil || results["u1"] != nil {
			t.Errorf("%v, %v", results, err)
		}
	}
	if prepared, err := driver.Prepared(); prepared || err != nil {
		t.Errorf("unprepared: %v, %v", prepared, err)
	}
}

func TestNotAllocated(t *testing.T) {
	results, err := (&Driver{CDIDir: t.TempDir()}).PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{UID: "u1"}}})
	if err != nil || results["u1"].Err == nil {
		t.Errorf("%+v, %v", results, err)
	}
}
