// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"regexp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// The values of fields. The chart's admission policy has them, too; testdata/corpus.yaml has
// configurations with each.
var (
	strategies       = []Strategy{MPS, TimeSlicing}
	intervals        = []Interval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}
	clientPriorities = []ClientPriority{PriorityNormal, PriorityBelowNormal}
)

// maxDevices is how many devices a claim can have. Each has one limit at most.
const maxDevices = resourceapi.AllocationResultsMaxSize

// deviceKey matches an index in the claim or a UUID as NVML prints it.
var deviceKey = regexp.MustCompile(`^([0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,80})$`)

// Validate implements Config.
func (c *GpuConfig) Validate() error { return validate(c.TypeMeta, GpuConfigKind, c.Sharing) }

// Validate implements Config.
func (c *MigDeviceConfig) Validate() error {
	return validate(c.TypeMeta, MigDeviceConfigKind, c.Sharing.alike())
}

func validate(meta metav1.TypeMeta, kind string, sharing *GpuSharing) error {
	faults := validateType(meta.APIVersion, meta.Kind, kind)
	if sharing != nil {
		path := field.NewPath("sharing")
		faults = append(faults, validateStrategy(sharing.Strategy, path)...)
		faults = append(faults, validateTimeSlicing(sharing, path)...)
		faults = append(faults, validateMPS(sharing.Strategy, sharing.MPSConfig, path)...)
	}
	return invalid(kind, faults)
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
	switch {
	case slices.Contains(strategies, strategy):
		return nil
	case strategy == "":
		return field.ErrorList{field.Required(path, `must be "MPS" or "TimeSlicing"`)}
	}
	return field.ErrorList{field.NotSupported(path, quote.Short(string(strategy)), strategies)}
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
	if config.Interval != nil && !slices.Contains(intervals, *config.Interval) {
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
	if priority := config.DefaultClientPriority; priority != nil && !slices.Contains(clientPriorities, *priority) {
		faults = append(faults, field.NotSupported(path.Child("defaultClientPriority"), quote.Short(string(*priority)), clientPriorities))
	}
	perDevice := path.Child("defaultPerDevicePinnedMemoryLimit")
	if n := len(config.DefaultPerDevicePinnedMemoryLimit); n > maxDevices {
		return append(faults, field.TooMany(perDevice, n, maxDevices))
	}
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
