// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"io/fs"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/node/host"
)

// writtenOrHalf finds files, and what a process that was killed has left of them.
func writtenOrHalf(pattern string) ([]string, error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	half, err := filepath.Glob(host.TemporaryName(pattern))
	return append(files, half...), err
}

// metadataWriter returns what replaces a file. Unlike the helper's own, it does not wait for the disk,
// which would double the time of a claim: after a power loss the kubelet has each claim prepared again.
// And it makes what containers read readable for them on a node with SELinux.
func (o *Options) metadataWriter() func(path string, data []byte, mode fs.FileMode) error {
	var writing sync.Mutex // of a claim that two pods share
	return func(path string, data []byte, mode fs.FileMode) error {
		writing.Lock()
		defer writing.Unlock()
		err := host.ReplaceUnsynced(path, data, mode)
		if err != nil || o.FileContext == "" || filepath.Dir(path) == filepath.Clean(o.CDIDir) {
			return err
		}
		return unix.Setxattr(path, "security.selinux", append([]byte(o.FileContext), 0), 0)
	}
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
