// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package api holds the opaque device configuration that a DeviceClass or a
// ResourceClaim carries for this driver: API group resource.nvidia.com/v1beta1,
// kinds GpuConfig and MigDeviceConfig, with the fields of NVIDIA's own DRA
// driver, so that manifests written for it keep working. The one field that NVIDIA's does
// not have is MPSConfig.DefaultClientPriority.
//
// The text may come from any tenant of the cluster. Decode and Validate accept any
// input without panicking and without unbounded work; their errors name the field,
// the value and what is expected. A node calls them before it prepares a claim. The chart's
// admission policy says the same earlier, in CEL; testdata/corpus.yaml keeps the two equal.
package api

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

const (
	// Version is the apiVersion of all kinds here.
	Version = "resource.nvidia.com/v1beta1"
	// GpuConfigKind configures whole GPUs.
	GpuConfigKind = "GpuConfig"
	// MigDeviceConfigKind configures MIG partitions.
	MigDeviceConfigKind = "MigDeviceConfig"
)

// Config is *GpuConfig or *MigDeviceConfig.
type Config interface {
	// Validate returns nil or an *InvalidError with every fault found.
	Validate() error
	// MPS returns the settings if the configuration asks for MPS, or nil.
	MPS() *MPSConfig
	// Interval returns the interval of time-slicing that the configuration asks for.
	// IntervalDefault asks for nothing.
	Interval() Interval
}

var (
	_ Config = (*GpuConfig)(nil)
	_ Config = (*MigDeviceConfig)(nil)
)

// GpuConfig configures a whole GPU.
type GpuConfig struct {
	metav1.TypeMeta `json:",inline"`
	// sharing is how the containers that use the claim share the device. Absent: nothing is
	// set.
	Sharing *GpuSharing `json:"sharing,omitempty"`
}

// MigDeviceConfig configures a MIG partition.
type MigDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`
	// sharing is how the containers that use the claim share the device. Absent: nothing is
	// set.
	Sharing *MigDeviceSharing `json:"sharing,omitempty"`
}
