// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/test/scale/slices/reference"
)

// namesIn are the attributes that say something and the capacities of devices, by their type.
func namesIn(objects []resourceapi.ResourceSlice) map[string][]resourceapi.QualifiedName {
	names := map[string][]resourceapi.QualifiedName{}
	for _, d := range devicesOf(objects) {
		var own []resourceapi.QualifiedName
		for name, value := range d.Attributes {
			if value.StringValue == nil || *value.StringValue != "" {
				own = append(own, name)
			}
		}
		for name := range d.Capacity {
			own = append(own, name)
		}
		names[*d.Attributes["type"].StringValue] = own
	}
	return names
}

// TestNamesOfReferenceDriver: a selector that reads a name which a device does not have is an error that ends
// the pod's scheduling. So whole GPUs and partitions have every attribute and capacity that NVIDIA's driver
// gives them.
func TestNamesOfReferenceDriver(t *testing.T) {
	compared := 0
	for _, name := range boards.Names() {
		node := loadNode(t, name)
		withMIG := replicate(node, 1)
		withMIG.GPUs[0].MIG = cmp.Or(withMIG.GPUs[0].MIG, &gpu.MIG{}) // what is not there has no partitions
		theirs := namesIn(reference.Pool{Driver: testOptions.Driver, Node: testOptions.NodeName}.ResourceSlices(withMIG))
		for _, d := range devicesOf(inventoryOf(t, node, Terms{}).ResourceSlices(testOptions)) {
			for _, wanted := range theirs[*d.Attributes["type"].StringValue] {
				compared++
				_, is := d.Attributes[wanted]
				_, isCapacity := d.Capacity[wanted]
				if !is && !isCapacity {
					t.Errorf("NVIDIA's driver publishes %s, and %s of %s does not have it", wanted, d.Name, name)
				}
			}
		}
	}
	if t.Logf("%d names compared", compared); compared < 2000 {
		t.Errorf("only %d names were compared", compared)
	}
}
