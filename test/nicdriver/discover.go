// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nicdriver

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

// networkClass begins the PCI class of network controllers.
const networkClass = "0x02"

// Discover returns the network cards that sysfs shows below sysRoot, with the attributes that
// Kubernetes defines for PCI devices.
func Discover(sysRoot string) ([]resourceapi.Device, error) {
	folder := filepath.Join(sysRoot, "bus/pci/devices")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	var devices []resourceapi.Device
	for _, entry := range entries {
		class, err := os.ReadFile(filepath.Join(folder, entry.Name(), "class"))
		if err != nil {
			return nil, fmt.Errorf("read the class of PCI device %s: %w", entry.Name(), err)
		}
		if !strings.HasPrefix(string(class), networkClass) {
			continue
		}
		attributes, err := attributesOf(sysRoot, entry.Name())
		if err != nil {
			return nil, err
		}
		devices = append(devices, resourceapi.Device{Name: deviceName(entry.Name()), Attributes: attributes})
	}
	return devices, nil
}

// deviceName is "nic-0000-19-00-0" for 0000:19:00.0.
func deviceName(address string) string {
	return "nic-" + strings.NewReplacer(":", "-", ".", "-").Replace(address)
}

func attributesOf(sysRoot, address string) (map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, error) {
	sysfs := deviceattribute.WithFSFromRoot(sysRoot)
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for _, read := range []func() (deviceattribute.DeviceAttribute, error){
		func() (deviceattribute.DeviceAttribute, error) {
			return deviceattribute.GetPCIBusIDAttribute(address)
		},
		func() (deviceattribute.DeviceAttribute, error) {
			return deviceattribute.GetPCIeRootAttributeByPCIBusID(address, sysfs)
		},
		func() (deviceattribute.DeviceAttribute, error) {
			return deviceattribute.GetNUMANodeAttributeByPCIBusID(address, deviceattribute.ScalarAttribute, sysfs)
		},
	} {
		attribute, err := read()
		if err != nil {
			return nil, fmt.Errorf("attributes of PCI device %s: %w", address, err)
		}
		attributes[attribute.Name] = attribute.Value
	}
	return attributes, nil
}
