// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
)

// ExtendedResources is the attribute of devices that pods can have by an extended resource, such as
// nvidia.com/gpu. Classes with such a resource select by it.
const ExtendedResources = "extendedResources"

// firstExtended is the first version whose kubelets know by default that an extended resource can be a device.
var firstExtended = version.MustParseGeneric("1.36.0")

// KnowsExtendedResources reports whether a kubelet of this version gives a container the devices that the
// scheduler has allocated for an extended resource. An older one starts the container without. The feature
// gate DRAExtendedResource can change that both ways, which no API tells.
func KnowsExtendedResources(kubelet string) (bool, error) {
	v, err := version.ParseGeneric(kubelet)
	if err != nil {
		return false, fmt.Errorf("the version %q of the kubelet: %w", kubelet, err)
	}
	return !v.LessThan(firstExtended), nil
}

// attributes of a device of this board. An observer gives a pod nothing, so that no resource stands for it.
func (b board) attributes(d Device) attributes {
	a := attributesOf(b.node, d)
	if b.extended && d.Kind != Observer {
		a[ExtendedResources] = resourceapi.DeviceAttribute{BoolValue: new(true)}
	}
	return a
}
