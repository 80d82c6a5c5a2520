// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
)

// opaque is a configuration of a driver for requests.
func opaque(driver, parameters string, requests ...string) resourcev1.DeviceClaimConfiguration {
	return resourcev1.DeviceClaimConfiguration{Requests: requests, DeviceConfiguration: resourcev1.DeviceConfiguration{
		Opaque: &resourcev1.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
	}}
}

// padded makes parameters as long as the API allows.
func padded(parameters string) string {
	return parameters + strings.Repeat(" ", resourcev1.OpaqueParametersMaxLength-len(parameters))
}

// largestConfigs is a claim that is right, with as much as it may have of everything that the
// policy for configurations looks at: requests, alternatives, configurations for all of them,
// and limits.
func largestConfigs() *resourcev1.ResourceClaim {
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "largest", Namespace: "default"}}
	capacity := &resourcev1.CapacityRequirements{Requests: map[resourcev1.QualifiedName]resource.Quantity{}}
	for i := range 31 {
		capacity.Requests[resourcev1.QualifiedName(fmt.Sprintf("%032d", i))] = resource.MustParse("1")
	}
	capacity.Requests["memory"] = resource.MustParse("64Mi")
	var names []string
	for i := range resourcev1.DeviceRequestsMaxSize {
		r := resourcev1.DeviceRequest{Name: fmt.Sprintf("r%062d", i)}
		for j := range resourcev1.FirstAvailableDeviceRequestMaxSize {
			// The last one of all decides that the configurations may be of use.
			class := "mps.partage.dev"
			if i == resourcev1.DeviceRequestsMaxSize-1 && j == resourcev1.FirstAvailableDeviceRequestMaxSize-1 {
				class = strings.Repeat("c", 253)
			}
			r.FirstAvailable = append(r.FirstAvailable, resourcev1.DeviceSubRequest{Name: fmt.Sprintf("s%062d", j), DeviceClassName: class, Capacity: capacity})
		}
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, r)
		names = append(names, r.Name)
	}
	var limits []string
	for i := range resourcev1.AllocationResultsMaxSize {
		limits = append(limits, fmt.Sprintf(`"GPU-%080d":"+%020d.%09dk"`, i, 1<<50, 0))
	}
	const most = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","timeSlicingConfig":null,"mpsConfig":{"defaultClientPriority":"BelowNormal",` +
		`"defaultActiveThreadPercentage":50.0,"defaultPinnedDeviceMemoryLimit":"1Gi","multiUser":true,"defaultPerDevicePinnedMemoryLimit":{%s}}}}`
	for i := range resourcev1.DeviceConfigMaxSize {
		// Half of them are another driver's.
		driver := []string{"gpu.nvidia.com", strings.Repeat("d", 63)}[i%2]
		claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, opaque(driver, padded(fmt.Sprintf(most, strings.Join(limits, ","))), names...))
	}
	return claim
}

// document returns the text of a claim.
func document(t *testing.T, claim *resourcev1.ResourceClaim) []byte {
	t.Helper()
	claim = claim.DeepCopy()
	claim.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"}
	text, err := json.Marshal(claim)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestLargestConfigs: the largest right claim is taken, and large wrong ones are refused with
// a message that begins with a fault.
func TestLargestConfigs(t *testing.T) {
	server := newAPIServer(t, "defaults")
	ours := largestConfigs()
	for i := range ours.Spec.Devices.Config {
		ours.Spec.Devices.Config[i].Opaque.Driver = "gpu.nvidia.com"
	}
	others := largestConfigs()
	for i := range others.Spec.Devices.Config {
		others.Spec.Devices.Config[i].Opaque.Driver = "other.example.com"
	}
	for name, claim := range map[string]*resourcev1.ResourceClaim{"of two drivers": largestConfigs(), "ours": ours, "of others": others} {
		if _, refused := server.create(t, "default", document(t, claim)); refused != nil {
			t.Errorf("%s: %.2000s", name, refused)
		}
	}

	// With as many classes as the chart can have, of which the last one is asked for.
	partitions := largestConfigs()
	for i := range partitions.Spec.Devices.Requests {
		for j := range partitions.Spec.Devices.Requests[i].FirstAvailable {
			partitions.Spec.Devices.Requests[i].FirstAvailable[j].DeviceClassName = "mig-7g.94gb.nvidia.com"
		}
	}
	last := &partitions.Spec.Devices.Requests[resourcev1.DeviceRequestsMaxSize-1]
	last.FirstAvailable[resourcev1.FirstAvailableDeviceRequestMaxSize-1].DeviceClassName = strings.Repeat("c", 253)
	if _, refused := newAPIServer(t, "mig-resources-all").create(t, "default", document(t, partitions)); refused != nil {
		t.Errorf("of many classes: %.2000s", refused)
	}

	configs := func(parameters string, requests ...string) *resourcev1.ResourceClaim {
		claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "largest", Namespace: "default"}}
		for range resourcev1.DeviceConfigMaxSize {
			claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, opaque("gpu.nvidia.com", padded(parameters), requests...))
		}
		return claim
	}
	// many fills the room that is left with members of an object.
	many := func(form, member string) string {
		var members []string
		for size := len(form); ; {
			next := fmt.Sprintf(member, len(members))
			if size += len(next) + 1; size > resourcev1.OpaqueParametersMaxLength {
				return fmt.Sprintf(form, strings.Join(members, ","))
			}
			members = append(members, next)
		}
	}
	const mps = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{%s}}}`
	misfits := largestConfigs()
	last = &misfits.Spec.Devices.Requests[resourcev1.DeviceRequestsMaxSize-1]
	last.FirstAvailable[resourcev1.FirstAvailableDeviceRequestMaxSize-1].DeviceClassName = "mps.partage.dev"
	for i := range misfits.Spec.Devices.Config {
		var names []string
		for _, r := range misfits.Spec.Devices.Requests {
			names = append(names, r.Name+"/"+r.FirstAvailable[i%resourcev1.FirstAvailableDeviceRequestMaxSize].Name)
		}
		misfits.Spec.Devices.Config[i].Requests = names
	}
	small := largestConfigs()
	small.Spec.Devices.Config = nil
	for i := range small.Spec.Devices.Requests {
		for j := range small.Spec.Devices.Requests[i].FirstAvailable {
			small.Spec.Devices.Requests[i].FirstAvailable[j].Capacity.Requests["memory"] = resource.MustParse("10")
		}
	}
	for name, c := range map[string]struct {
		claim *resourcev1.ResourceClaim
		want  string
	}{
		"unknown fields":     {configs(many(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",%s}`, `"%d":0`)), "unknown field"},
		"unknown settings":   {configs(many(mps, `"%d":0`)), "unknown field"},
		"long names":         {configs(many(mps, `"%03000d":0`)), "unknown field"},
		"limits":             {configs(many(fmt.Sprintf(mps, `"defaultPerDevicePinnedMemoryLimit":{%s}`), `"%d":"1Gi"`)), "Too many"},
		"long limits":        {configs(many(fmt.Sprintf(mps, `"defaultPerDevicePinnedMemoryLimit":{%s}`), `"GPU-%0300d":"00000000000000000000000000000000000000000000000000000000x"`)), "a key must be"},
		"one long limit":     {configs(fmt.Sprintf(mps, `"defaultPinnedDeviceMemoryLimit":"`+strings.Repeat("1", 9000)+`"`)), "must be a quantity of memory"},
		"a long kind":        {configs(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + strings.Repeat("k", 9000) + `"}`), "kind: Unsupported value"},
		"a long strategy":    {configs(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"` + strings.Repeat("s", 9000) + `"}}`), "strategy: Unsupported value"},
		"letters of 4 bytes": {configs(many(fmt.Sprintf(mps, `"defaultPerDevicePinnedMemoryLimit":{%s}`), `"`+strings.Repeat("😀", 64)+`%d":"`+strings.Repeat("😀", 64)+`"`)), "Invalid value"},
		"misfits":            {misfits, "does not apply to request"},
		"small shares":       {small, "must be at least 64Mi"},
	} {
		object := mustDecode(t, document(t, c.claim))
		_, refused := server.ask(t, request{by: somebody, operation: admission.Create, namespace: "default", object: object})
		if refused == nil || !strings.Contains(refused.Error(), c.want) || utf8.RuneCountInString(refused.Error()) > 3000 {
			t.Errorf("%s: got %.1000v, want %s", name, refused, c.want)
		}
	}
}
