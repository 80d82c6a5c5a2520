// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

// entry is what a driver says about a device in the status of a claim.
func entry(driver, pool, data string) resourcev1.AllocatedDeviceStatus {
	return resourcev1.AllocatedDeviceStatus{
		Driver: driver, Pool: pool, Device: "d", Data: &runtime.RawExtension{Raw: []byte(data)},
		Conditions: []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Ready"}},
	}
}

// withEntries is a claim that was allocated on a node, with entries.
func withEntries(entries ...resourcev1.AllocatedDeviceStatus) *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c", UID: "uid-c"},
		Status: resourcev1.ResourceClaimStatus{
			Allocation: &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
				Results: []resourcev1.DeviceRequestAllocationResult{{Request: "r", Driver: driver, Pool: ownNode, Device: "d"}},
				Config: []resourcev1.DeviceAllocationConfiguration{{
					Source: resourcev1.AllocationConfigSourceClaim,
					DeviceConfiguration: resourcev1.DeviceConfiguration{Opaque: &resourcev1.OpaqueDeviceConfiguration{
						Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(`{"kind": "GpuConfig", "sharing": {"strategy": "MPS"}}`)},
					}},
				}},
			}},
			ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: "uid-p"}},
			Devices:     entries,
		},
	}
}

// TestClaimStatus: the plugin writes entries of its driver and node, and nothing else of a
// claim's status.
func TestClaimStatus(t *testing.T) {
	server := newAPIServer(t, "defaults")
	mine := func(data string) resourcev1.AllocatedDeviceStatus { return entry(driver, ownNode, data) }
	nic, elsewhere := entry("nic.example.com", ownNode, `{"ip": "10.0.0.1"}`), entry(driver, "node-2", `{"uuid": "GPU-2"}`)
	for name, test := range map[string]struct {
		old, new []resourcev1.AllocatedDeviceStatus
		edit     func(*resourcev1.ResourceClaim)
		by       user.Info
		want     string
	}{
		"first entry":         {new: []resourcev1.AllocatedDeviceStatus{mine("{}")}},
		"beside others":       {old: []resourcev1.AllocatedDeviceStatus{nic, elsewhere}, new: []resourcev1.AllocatedDeviceStatus{nic, elsewhere, mine("{}")}},
		"change":              {old: []resourcev1.AllocatedDeviceStatus{nic, mine("{}")}, new: []resourcev1.AllocatedDeviceStatus{nic, mine(`{"uuid": "GPU-1"}`)}},
		"removal":             {old: []resourcev1.AllocatedDeviceStatus{mine("{}"), nic}, new: []resourcev1.AllocatedDeviceStatus{nic}},
		"nothing":             {old: []resourcev1.AllocatedDeviceStatus{nic}, new: []resourcev1.AllocatedDeviceStatus{nic}},
		"somebody else":       {old: []resourcev1.AllocatedDeviceStatus{mine("{}")}, new: []resourcev1.AllocatedDeviceStatus{nic}, by: somebody},
		"entry of another":    {new: []resourcev1.AllocatedDeviceStatus{nic}, want: "devices of driver"},
		"another one removed": {old: []resourcev1.AllocatedDeviceStatus{nic}, want: "devices of driver"},
		"another one changed": {old: []resourcev1.AllocatedDeviceStatus{nic}, new: []resourcev1.AllocatedDeviceStatus{entry("nic.example.com", ownNode, `{"ip": "10.0.0.2"}`)}, want: "devices of driver"},
		"of another node":     {new: []resourcev1.AllocatedDeviceStatus{elsewhere}, want: "and pool node-1 only"},
		"by another node":     {new: []resourcev1.AllocatedDeviceStatus{mine("{}")}, by: pluginOn("node-2"), want: "and pool node-2 only"},
		"token without a pod": {new: []resourcev1.AllocatedDeviceStatus{mine("{}")}, by: pluginOn(""), want: "not bound to a pod"},
		"deallocation":        {edit: func(c *resourcev1.ResourceClaim) { c.Status.Allocation = nil }, want: "allocation of a claim"},
		"another device":      {edit: func(c *resourcev1.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Device = "e" }, want: "allocation of a claim"},
		"another configuration": {edit: func(c *resourcev1.ResourceClaim) {
			c.Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw = []byte(`{"kind": "GpuConfig"}`)
		}, want: "allocation of a claim"},
		"nobody": {edit: func(c *resourcev1.ResourceClaim) { c.Status.ReservedFor = nil }, want: "reserved for"},
		"another pod": {edit: func(c *resourcev1.ResourceClaim) {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "q", UID: "uid-q"})
		}, want: "reserved for"},
	} {
		t.Run(name, func(t *testing.T) {
			changed := withEntries(test.new...)
			if test.edit != nil {
				test.edit(changed)
			}
			by := test.by
			if by == nil {
				by = pluginOn(ownNode)
			}
			_, err := server.ask(t, request{
				by: by, operation: admission.Update, namespace: "team", object: changed, old: withEntries(test.old...), subresource: "status",
			})
			check(t, err, test.want)
		})
	}
}
