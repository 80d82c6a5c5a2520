// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// toy is the node of Kubernetes' own benchmark of DRA: ten devices that draw on no counters.
func toy() []resourceapi.ResourceSlice {
	made := make([]resourceapi.ResourceSlice, 1)
	for n := range 10 {
		root := fmt.Sprintf("pci0000:0%d", n%2)
		sriov := true
		made[0].Spec.Devices = append(made[0].Spec.Devices, resourceapi.Device{
			Name: fmt.Sprintf("basic-device-%d", n),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"driver": text("xe"), "driverVersion": version("1.2.3"), "family": text("Arc Pro B-Series"), "health": text("Healthy"),
				"model": text("B60"), "pciAddress": text(fmt.Sprintf("0000:0%d:00.0", n)), "pciId": text("0xe211"), "pciRoot": text(root),
				"resource.kubernetes.io/pciBusID": text(fmt.Sprintf("0000:0%d:00.0", n)), "resource.kubernetes.io/pciRoot": text(root),
				"sriov": {BoolValue: &sriov}, "type": text("gpu"),
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				"memory": {Value: resource.MustParse("24480Mi")}, "millicores": {Value: resource.MustParse("1k")},
			},
		})
	}
	return pool.Complete(made)
}

func text(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &value}
}

func version(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{VersionValue: &value}
}
