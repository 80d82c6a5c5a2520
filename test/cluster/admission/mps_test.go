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
		`config: [{opaque: {driver: gpu.nvidia.com, parameters: [1]}}]`:                                                                    false,
		`config: [{opaque: {driver: gpu.nvidia.com, parameters: null}}]`:                                                                   false,
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
	if t.Logf("%d cases", cases); cases != 17*2*3 {
		t.Errorf("%d cases", cases)
	}
}

// TestClassOfNamespace: claims of a namespace may ask for the one class for MPS shares that
// its label names, and for all other classes.
func TestClassOfNamespace(t *testing.T) {
	const exactly, first = `requests: [{name: a, exactly: {deviceClassName: %s}}]`,
		`requests: [{name: a, firstAvailable: [{name: p, deviceClassName: mig.nvidia.com}, {name: q, deviceClassName: %s}]}]`
	server := newAPIServer(t, "tenants-of-mps")
	for class, refused := range map[string]map[string]string{
		"team-a.mps.example.com": {"restricted": "namespace restricted has no label example.com/mps-class"},
		"team-b.mps.example.com": {"restricted": "has no label", "team-a": "one device class for MPS shares only, team-a.mps.example.com"},
		"mps.partage.dev":        {"restricted": "has no label", "team-a": "which is the value of its label example.com/mps-class"},
		"gpu.nvidia.com":         {},
	} {
		for _, namespace := range []string{"restricted", "team-a"} {
			for _, form := range []string{exactly, first} {
				document := "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: a}\nspec: {devices: {" + fmt.Sprintf(form, class) + "}}"
				_, err := server.create(t, namespace, []byte(document))
				if want := refused[namespace]; (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("class %s in namespace %s: got %v, want %q", class, namespace, err, want)
				}
			}
		}
	}
}
