// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

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

// GpuSharing is how a whole GPU is shared.
type GpuSharing struct {
	// Strategy is required.
	Strategy Strategy `json:"strategy"`
	// TimeSlicingConfig may be set with strategy TimeSlicing only.
	TimeSlicingConfig *TimeSlicingConfig `json:"timeSlicingConfig,omitempty"`
	// MPSConfig may be set with strategy MPS only.
	MPSConfig *MPSConfig `json:"mpsConfig,omitempty"`
}

// MigDeviceSharing is how a partition is shared. Time-slicing has no settings because
// intervals do not apply to MIG.
type MigDeviceSharing struct {
	// Strategy is required.
	Strategy Strategy `json:"strategy"`
	// MPSConfig may be set with strategy MPS only.
	MPSConfig *MPSConfig `json:"mpsConfig,omitempty"`
}

// OnlyClientPriority reports whether the settings are a priority and nothing else.
func (c *MPSConfig) OnlyClientPriority() bool {
	return c.DefaultClientPriority != nil && c.DefaultActiveThreadPercentage == nil && c.DefaultPinnedDeviceMemoryLimit == nil &&
		c.DefaultPerDevicePinnedMemoryLimit == nil && c.MultiUser == nil
}

// TimeSlicingConfig holds the settings of strategy TimeSlicing.
type TimeSlicingConfig struct {
	// Interval is IntervalDefault when absent.
	Interval *Interval `json:"interval,omitempty"`
}

// MPSConfig holds the settings of strategy MPS. Limits are for each client, which is a
// process: a container may have several.
type MPSConfig struct {
	// DefaultActiveThreadPercentage is the part of the multiprocessors that one
	// client may use, 1 to 100. Nil and 0 set no limit.
	DefaultActiveThreadPercentage *int `json:"defaultActiveThreadPercentage,omitempty"`
	// DefaultPinnedDeviceMemoryLimit is the device memory that one client may
	// use on each device, at least 1Mi. Nil sets no limit.
	DefaultPinnedDeviceMemoryLimit *MemoryLimit `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	// DefaultPerDevicePinnedMemoryLimit takes precedence over
	// DefaultPinnedDeviceMemoryLimit. A key is a device's UUID or its index among
	// those of the claim that the configuration is for, from 0; there are at most 32. See
	// MemoryLimits.
	DefaultPerDevicePinnedMemoryLimit map[string]MemoryLimit `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	// MultiUser lets clients of different user ids run at the same time.
	MultiUser *bool `json:"multiUser,omitempty"`
	// DefaultClientPriority is the priority of clients that do not set their own. It is
	// this driver's addition to the fields of NVIDIA's, and the only field that also
	// applies to an MPS share. Nil is the policy's for a share, otherwise PriorityNormal.
	DefaultClientPriority *ClientPriority `json:"defaultClientPriority,omitempty"`
}

// ClientPriority is a priority among the clients of an MPS server, a hint to the driver.
type ClientPriority string

// Values of ClientPriority are 0 and 1 in NVIDIA's documentation.
const (
	PriorityNormal      ClientPriority = "Normal"
	PriorityBelowNormal ClientPriority = "BelowNormal"
)

func (c *GpuConfig) setDefaults() {
	if c.Sharing == nil {
		return
	}
	switch c.Sharing.Strategy {
	case TimeSlicing:
		if c.Sharing.TimeSlicingConfig == nil {
			c.Sharing.TimeSlicingConfig = &TimeSlicingConfig{}
		}
		if c.Sharing.TimeSlicingConfig.Interval == nil {
			interval := IntervalDefault
			c.Sharing.TimeSlicingConfig.Interval = &interval
		}
	case MPS:
		if c.Sharing.MPSConfig == nil {
			c.Sharing.MPSConfig = &MPSConfig{}
		}
	}
}

func (c *MigDeviceConfig) setDefaults() {
	if c.Sharing != nil && c.Sharing.Strategy == MPS && c.Sharing.MPSConfig == nil {
		c.Sharing.MPSConfig = &MPSConfig{}
	}
}

// MPS implements Config.
func (c *GpuConfig) MPS() *MPSConfig {
	if c.Sharing == nil {
		return nil
	}
	return c.Sharing.Strategy.mps(c.Sharing.MPSConfig)
}

// MPS implements Config.
func (c *MigDeviceConfig) MPS() *MPSConfig {
	if c.Sharing == nil {
		return nil
	}
	return c.Sharing.Strategy.mps(c.Sharing.MPSConfig)
}

// mps also serves configurations that were made in Go and have no defaults.
func (s Strategy) mps(config *MPSConfig) *MPSConfig {
	switch {
	case s != MPS:
		return nil
	case config == nil:
		return &MPSConfig{}
	default:
		return config
	}
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
