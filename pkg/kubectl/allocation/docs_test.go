// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation_test

import (
	"os"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/test/docs/snippet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// asClaim returns the claim that a document, or a part of a claim, asks for; nothing if it is
// something else.
func asClaim(t *testing.T, where, document string) *resourceapi.DeviceClaim {
	t.Helper()
	var part struct {
		resourceapi.DeviceRequest
		resourceapi.DeviceClaim
		Spec struct{ Spec resourceapi.ResourceClaimSpec }
	}
	if err := yaml.Unmarshal([]byte(document), &part); err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	switch {
	case len(part.Spec.Spec.Devices.Requests) > 0:
		return &part.Spec.Spec.Devices
	case len(part.Requests) > 0:
		return &part.DeviceClaim
	case part.Exactly != nil || len(part.FirstAvailable) > 0:
		part.Name = "gpu"
		return &resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{part.DeviceRequest}}
	}
	return nil
}

// allocated asks for devices on a node with two free H100 that NVLink joins, and a network card beside the second, with the
// defaults of the API server.
func allocated(t *testing.T, devices resourceapi.DeviceClaim) allocation.Answer {
	t.Helper()
	for i := range devices.Requests {
		if e := devices.Requests[i].Exactly; e != nil && e.AllocationMode == "" {
			e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeExactCount, max(1, e.Count)
		}
		for j := range devices.Requests[i].FirstAvailable {
			e := &devices.Requests[i].FirstAvailable[j]
			e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeExactCount, max(1, e.Count)
		}
	}
	f := fleettest.New(t)
	node := f.AddPairs("n1", "h100-80-sxm", 2)
	f.AddNetworkCard("n1", "nic.demo.partage.dev", "pci0000:23")
	claim := f.Claim("team", "claim")
	claim.Spec.Devices = devices
	return allocation.New(f.Snapshot).Within(patient).OnNode(t.Context(), node, one(claim))
}

// TestDocs: what guides and examples ask for can be allocated on a node with two free H100.
func TestDocs(t *testing.T) {
	documents := map[string]string{}
	pages, err := snippet.Pages("../../..")
	if err != nil {
		t.Fatal(err)
	}
	for path, page := range pages {
		if !strings.HasPrefix(path, "docs/how-to/request/") {
			continue
		}
		for _, b := range snippet.Blocks(path, page, "yaml") {
			if !strings.Contains(b.Text, "\n…\n") {
				documents[b.String()] = b.Text
			}
		}
	}
	for _, path := range []string{
		"docs/examples/notebook.yaml", "docs/examples/pytorch-share.yaml", "docs/examples/vllm-mps.yaml",
		"docs/examples/ray/raycluster.yaml", "docs/examples/ray/rayservice.yaml",
	} {
		content, err := os.ReadFile("../../../" + path)
		if err != nil {
			t.Fatal(err)
		}
		documents[path], _, _ = strings.Cut(string(content), "\n---\n")
	}
	seen := 0
	for where, document := range documents {
		devices := asClaim(t, where, document)
		if devices == nil {
			continue
		}
		seen++
		if answer := allocated(t, *devices); answer.Verdict != allocation.Fits {
			t.Errorf("%s: %+v", where, answer)
		}
	}
	if t.Logf("%d cases", seen); seen < 10 {
		t.Errorf("only %d claims", seen)
	}
}

// TestBrokenDocs: a page that asks for what there is not fails.
func TestBrokenDocs(t *testing.T) {
	for document, want := range map[string]allocation.Verdict{
		"exactly: {deviceClassName: mig.nvidia.com, capacity: {requests: {memory: 18Gi}}}":                                   allocation.Fits,
		"exactly: {deviceClassName: mig.nvidia.com, capacity: {requests: {memory: 180Gi}}}":                                  allocation.Refused,
		"exactly: {deviceClassName: gpu.nvidia.com, count: 3}":                                                               allocation.Refused,
		"firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com, count: 3}, {name: b, deviceClassName: gpu.nvidia.com}]": allocation.Fits,
	} {
		devices := asClaim(t, document, document)
		if devices == nil {
			t.Fatalf("%s is no claim", document)
		}
		if answer := allocated(t, *devices); answer.Verdict != want {
			t.Errorf("%s: %+v", document, answer)
		}
	}
}
