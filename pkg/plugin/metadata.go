// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/metadatafiles"
)

// deviceMetadata is what containers can read about their devices in files.
type deviceMetadata struct {
	enabled bool
	claims  ClaimViewer
	files   *metadatafiles.Files
	problem logchange.Problem
}

// of returns the metadata of a device of a claim that was just prepared.
func (m *deviceMetadata) of(d *claim.LiveDevice) *kubeletplugin.DeviceMetadata {
	if !m.enabled {
		return nil
	}
	return &kubeletplugin.DeviceMetadata{Attributes: metadataAttributes(d)}
}

// remove removes the files of a claim that is being released. The helper removes what this leaves.
func (m *deviceMetadata) remove(ctx context.Context, uid types.UID) (err error) {
	defer panics.Recover(ctx, &err)
	if !m.enabled {
		return nil
	}
	return m.files.Remove(uid)
}

// metadataAttributes are those with which the device is published, and what is only known while
// it lives.
func metadataAttributes(d *claim.LiveDevice) map[string]resourceapi.DeviceAttribute {
	all := map[string]resourceapi.DeviceAttribute{}
	for name, value := range d.Attributes {
		all[string(name)] = value
	}
	text := func(name, value string) { all[name] = resourceapi.DeviceAttribute{StringValue: &value} }
	number := func(name string, value int64) { all[name] = resourceapi.DeviceAttribute{IntValue: &value} }
	text("uuid", d.UUID())
	text(string(deviceattribute.StandardDeviceAttributePCIBusID), d.PCIAddress)
	if p := d.Partition; p != nil && !p.Gone {
		number("gpuInstanceID", int64(p.InstanceID))
		number("computeInstanceID", int64(p.ComputeID))
		number("placementStart", int64(p.Placement.Start))
		number("placementSize", int64(p.Placement.Size))
	}
	memory, multiprocessors := int64(d.Resources.MemoryBytes), int64(d.Resources.Multiprocessors)
	if l := d.Limits; l != nil {
		if l.MemoryBytes > 0 {
			memory = l.MemoryBytes
		}
		if l.Multiprocessors > 0 {
			multiprocessors = int64(l.Multiprocessors)
		}
		if l.Percent > 0 {
			number("smPercent", int64(l.Percent))
		}
	}
	number("memoryBytes", memory)
	number("multiprocessors", multiprocessors)
	if d.Session != nil {
		text("mpsSession", d.Session.ID)
	}
	return all
}

// options are those of the kubelet plugin helper.
func (m *deviceMetadata) options() []kubeletplugin.Option {
	if !m.enabled {
		return nil
	}
	return []kubeletplugin.Option{
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(m.files.CDIDir),
		kubeletplugin.MetadataFileOps(m.files.Operations()),
	}
}

// run looks after the files until ctx ends, also where no more are written.
func (m *deviceMetadata) run(ctx context.Context, interval time.Duration) {
	for {
		err := m.files.Sweep(time.Now(), m.known)
		m.problem.Log(ctx, err, "The files with the metadata of devices are not as they should be, will try again", "The files with the metadata of devices are as they should be")
		if !loop.Pause(ctx, interval) {
			return
		}
	}
}

func (m *deviceMetadata) known() (metadatafiles.Claims, error) {
	known := metadatafiles.Claims{Recorded: map[types.UID]bool{}, Prepared: map[types.UID]bool{}}
	recorded, err := m.claims.Recorded()
	if err != nil {
		return known, err
	}
	for _, uid := range recorded {
		known.Recorded[uid] = true
	}
	live, err := m.claims.Live()
	for _, c := range live {
		known.Prepared[c.Claim.UID] = true
	}
	return known, err
}
