// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import "cmp"

// Strategy is a way of sharing one device among containers.
type Strategy string

const (
	// TimeSlicing lets the GPU switch between the processes.
	TimeSlicing Strategy = "TimeSlicing"
	// MPS runs the processes side by side through NVIDIA's Multi-Process Service.
	MPS Strategy = "MPS"
)

// Interval is how long one process runs on a time-sliced GPU before the next.
type Interval string

// Values of Interval. Their lengths are defined by the driver and not documented.
const (
	IntervalDefault Interval = "Default"
	IntervalShort   Interval = "Short"
	IntervalMedium  Interval = "Medium"
	IntervalLong    Interval = "Long"
)

// GpuSharing is how a whole GPU is shared. The comments of fields are what
// docs/reference/claim-config.md says of them.
type GpuSharing struct {
	// strategy is how the processes share the device.
	Strategy Strategy `json:"strategy"`
	// timeSlicingConfig has the settings of the strategy TimeSlicing, and may be set with
	// that only.
	TimeSlicingConfig *TimeSlicingConfig `json:"timeSlicingConfig,omitempty"`
	// mpsConfig has the settings of the strategy MPS, and may be set with that only. Limits
	// are for each client, which is a process: a container may have several.
	MPSConfig *MPSConfig `json:"mpsConfig,omitempty"`
}

// MigDeviceSharing is how a partition is shared. Time-slicing has no settings because
// intervals do not apply to MIG.
type MigDeviceSharing struct {
	// strategy is how the processes share the device.
	Strategy Strategy `json:"strategy"`
	// mpsConfig has the settings of the strategy MPS, and may be set with that only. Limits
	// are for each client, which is a process: a container may have several.
	MPSConfig *MPSConfig `json:"mpsConfig,omitempty"`
}

// OnlyClientPriority reports whether the settings are a priority and nothing else.
func (c *MPSConfig) OnlyClientPriority() bool {
	return c.DefaultClientPriority != nil && c.DefaultActiveThreadPercentage == nil && c.DefaultPinnedDeviceMemoryLimit == nil &&
		c.DefaultPerDevicePinnedMemoryLimit == nil && c.MultiUser == nil
}

// TimeSlicingConfig holds the settings of strategy TimeSlicing.
type TimeSlicingConfig struct {
	// interval is how long one process runs before the next. Absent: Default, which leaves
	// the setting of the GPU alone.
	Interval *Interval `json:"interval,omitempty"`
}

// MPSConfig holds the settings of strategy MPS.
type MPSConfig struct {
	// defaultActiveThreadPercentage is the part of the multiprocessors that one client may
	// use, from 0 to 100. Absent and 0 set no limit.
	DefaultActiveThreadPercentage *int `json:"defaultActiveThreadPercentage,omitempty"`
	// defaultPinnedDeviceMemoryLimit is the device memory that one client may use on each
	// device, at least 1Mi. Absent: no limit.
	DefaultPinnedDeviceMemoryLimit *MemoryLimit `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	// defaultPerDevicePinnedMemoryLimit takes precedence over
	// defaultPinnedDeviceMemoryLimit. A key is the UUID of a GPU, or a device's index, from
	// 0, among those of the claim that the configuration is for. At most 32.
	DefaultPerDevicePinnedMemoryLimit map[string]MemoryLimit `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	// multiUser lets clients of different user IDs run at the same time. Absent: false.
	MultiUser *bool `json:"multiUser,omitempty"`
	// defaultClientPriority is the priority of clients that do not set their own, a hint to
	// the NVIDIA driver. NVIDIA's DRA driver does not have this field. It is the only one
	// that also applies to an MPS share. Absent: the priority of the sharing policy for a
	// share, otherwise Normal.
	DefaultClientPriority *ClientPriority `json:"defaultClientPriority,omitempty"`
}

// ClientPriority is a priority among the clients of an MPS server, a hint to the driver.
type ClientPriority string

// Values of ClientPriority are 0 and 1 in NVIDIA's documentation.
const (
	PriorityNormal      ClientPriority = "Normal"
	PriorityBelowNormal ClientPriority = "BelowNormal"
)

// alike returns the same settings for a whole GPU, or nil if nothing is set.
func (s *MigDeviceSharing) alike() *GpuSharing {
	if s == nil {
		return nil
	}
	return &GpuSharing{Strategy: s.Strategy, MPSConfig: s.MPSConfig}
}

// MPS implements Config.
func (c *GpuConfig) MPS() *MPSConfig { return c.Sharing.mps() }

// MPS implements Config.
func (c *MigDeviceConfig) MPS() *MPSConfig { return c.Sharing.alike().mps() }

func (s *GpuSharing) mps() *MPSConfig {
	if s == nil || s.Strategy != MPS {
		return nil
	}
	return cmp.Or(s.MPSConfig, &MPSConfig{})
}

// Interval implements Config.
func (c *GpuConfig) Interval() Interval {
	if s := c.Sharing; s != nil && s.Strategy == TimeSlicing && s.TimeSlicingConfig != nil && s.TimeSlicingConfig.Interval != nil {
		return *s.TimeSlicingConfig.Interval
	}
	return IntervalDefault
}

// Interval implements Config. MIG partitions have one interval only.
func (*MigDeviceConfig) Interval() Interval { return IntervalDefault }
