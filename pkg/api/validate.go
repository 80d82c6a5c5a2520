// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/quote"
)

// deviceKey matches an index in the claim or a UUID as NVML prints it.
var deviceKey = regexp.MustCompile(`^([0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,80})$`)

// Validate implements Config.
func (c *GpuConfig) Validate() error {
	faults := validateType(c.APIVersion, c.Kind, GpuConfigKind)
	if c.Sharing != nil {
		path := field.NewPath("sharing")
		faults = append(faults, validateStrategy(c.Sharing.Strategy, path)...)
		faults = append(faults, validateTimeSlicing(c.Sharing, path)...)
		faults = append(faults, validateMPS(c.Sharing.Strategy, c.Sharing.MPSConfig, path)...)
	}
	return invalid(GpuConfigKind, faults)
}

// Validate implements Config.
func (c *MigDeviceConfig) Validate() error {
	faults := validateType(c.APIVersion, c.Kind, MigDeviceConfigKind)
	if c.Sharing != nil {
		path := field.NewPath("sharing")
		faults = append(faults, validateStrategy(c.Sharing.Strategy, path)...)
		faults = append(faults, validateMPS(c.Sharing.Strategy, c.Sharing.MPSConfig, path)...)
	}
	return invalid(MigDeviceConfigKind, faults)
}

func validateType(version, kind, want string) field.ErrorList {
	var faults field.ErrorList
	if version != Version {
		faults = append(faults, field.NotSupported(field.NewPath("apiVersion"), quote.Short(version), []string{Version}))
	}
	if kind != want {
		faults = append(faults, field.NotSupported(field.NewPath("kind"), quote.Short(kind), []string{want}))
	}
	return faults
}

func validateStrategy(strategy Strategy, sharing *field.Path) field.ErrorList {
	path := sharing.Child("strategy")
	switch strategy {
	case TimeSlicing, MPS:
		return nil
	case "":
		return field.ErrorList{field.Required(path, `must be "MPS" or "TimeSlicing"`)}
	}
	return field.ErrorList{field.NotSupported(path, quote.Short(string(strategy)), []Strategy{MPS, TimeSlicing})}
}

func validateTimeSlicing(sharing *GpuSharing, path *field.Path) field.ErrorList {
	config := sharing.TimeSlicingConfig
	if config == nil {
		return nil
	}
	path = path.Child("timeSlicingConfig")
	if sharing.Strategy != TimeSlicing {
		return field.ErrorList{field.Forbidden(path, `may be set with strategy "TimeSlicing" only`)}
	}
	if config.Interval == nil {
		return nil
	}
	intervals := []Interval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}
	if !slices.Contains(intervals, *config.Interval) {
		return field.ErrorList{field.NotSupported(path.Child("interval"), quote.Short(string(*config.Interval)), intervals)}
	}
	return nil
}

func validateMPS(strategy Strategy, config *MPSConfig, path *field.Path) field.ErrorList {
	if config == nil {
		return nil
	}
	path = path.Child("mpsConfig")
	if strategy != MPS {
		return field.ErrorList{field.Forbidden(path, `may be set with strategy "MPS" only`)}
	}
	var faults field.ErrorList
	if percentage := config.DefaultActiveThreadPercentage; percentage != nil && (*percentage < 0 || *percentage > 100) {
		faults = append(faults, field.Invalid(path.Child("defaultActiveThreadPercentage"), *percentage, "must be between 0 and 100"))
	}
	if limit := config.DefaultPinnedDeviceMemoryLimit; limit != nil {
		faults = append(faults, validateMemory(*limit, path.Child("defaultPinnedDeviceMemoryLimit"))...)
	}
	priorities := []ClientPriority{PriorityNormal, PriorityBelowNormal}
	if priority := config.DefaultClientPriority; priority != nil && !slices.Contains(priorities, *priority) {
		faults = append(faults, field.NotSupported(path.Child("defaultClientPriority"), quote.Short(string(*priority)), priorities))
	}
	perDevice := path.Child("defaultPerDevicePinnedMemoryLimit")
	for _, key := range slices.Sorted(maps.Keys(config.DefaultPerDevicePinnedMemoryLimit)) {
		if !deviceKey.MatchString(key) {
			faults = append(faults, field.Invalid(perDevice, quote.Short(key), `a key must be a device's index in the claim, such as "0", or its UUID`))
		}
		faults = append(faults, validateMemory(config.DefaultPerDevicePinnedMemoryLimit[key], perDevice.Key(quote.Name(key)))...)
	}
	return faults
}

func validateMemory(limit MemoryLimit, path *field.Path) field.ErrorList {
	if _, err := limit.Bytes(); err != nil {
		return field.ErrorList{field.Invalid(path, quote.Short(string(limit)), err.Error())}
	}
	return nil
}
