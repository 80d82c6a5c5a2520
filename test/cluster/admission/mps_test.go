// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"strings"
	"testing"
)

// TestMPSNamespaces: claims that ask for MPS, in whichever way, are taken only where pods
// are restricted, and other claims everywhere.
func TestMPSNamespaces(t *testing.T) {
	config := func(driver, sharing string) string {
		return fmt.Sprintf(`requests: [{name: a, exactly: {deviceClassName: gpu.nvidia.com}}],
  config: [{opaque: {driver: %s, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: %s}}}]`, driver, sharing)
	}
	server := newAPIServer(t, "everything")
	cases := 0
	for devices, mps := range map[string]bool{
		``: false,
		`requests: [{name: a, exactly: {deviceClassName: gpu.nvidia.com}}]`:                                                                false,
		`requests: [{name: a, exactly: {deviceClassName: mps.partage.dev}}]`:                                                               true,
		`requests: [{name: a, exactly: {deviceClassName: shared.example.com}}]`:                                                            true,
		`requests: [{name: a, exactly: {deviceClassName: gpu.nvidia.com}}, {name: b, exactly: {deviceClassName: mps.partage.dev}}]`:        true,
		`requests: [{name: a, firstAvailable: [{name: p, deviceClassName: mig.nvidia.com}, {name: q, deviceClassName: mps.partage.dev}]}]`: true,
		`requests: [{name: a, firstAvailable: [{name: p, deviceClassName: mig.nvidia.com}, {name: q, deviceClassName: gpu.nvidia.com}]}]`:  false,
		config("gpu.nvidia.com", "{strategy: MPS}"):                                                                                        true,
		config("gpu.nvidia.com", "{strategy: TimeSlicing}"):                                                                                false,
		config("gpu.nvidia.com", "null"):                                                                                                   false,
		config("gpu.nvidia.com", "[MPS]"):                                                                                                  false,
		config("gpu.nvidia.com", "{}"):                                                                                                     false,
		config("other.example.com", "{strategy: MPS}"):                                                                                     false,
		`config: [{opaque: {driver: gpu.nvidia.com, parameters: {a: b}}}]`:                                                                 false,
		`config: [{opaque: {driver: other.example.com, parameters: {sharing: 3}}}]`:                                                        false,
	} {
		spec := "{devices: {" + devices + "}}"
		for kind, document := range map[string]string{
			"ResourceClaim":         "kind: ResourceClaim\nmetadata: {name: a}\nspec: " + spec,
			"ResourceClaimTemplate": "kind: ResourceClaimTemplate\nmetadata: {name: a}\nspec: {spec: " + spec + "}",
		} {
			for _, namespace := range []string{"restricted", "baseline", "default"} {
				cases++
				_, err := server.create(t, namespace, []byte("apiVersion: resource.k8s.io/v1\n"+document))
				if want := mps && namespace != "restricted"; (err != nil) != want {
					t.Errorf("%s in namespace %s, devices %s: got %v", kind, namespace, devices, err)
				}
				if err != nil && (!strings.Contains(err.Error(), "pod-security.kubernetes.io/enforce=restricted") || !strings.Contains(err.Error(), "namespace "+namespace)) {
					t.Errorf("the message does not say what would be right: %v", err)
				}
			}
		}
	}
	if t.Logf("%d cases", cases); cases != 15*2*3 {
		t.Errorf("%d cases", cases)
	}
}
