// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ThreadPercentage is the part of the multiprocessors that one client process may
// use, 1 to 100, or 0 for no limit.
func (c *MPSConfig) ThreadPercentage() int {
	if c.DefaultActiveThreadPercentage == nil {
		return 0
	}
	return *c.DefaultActiveThreadPercentage
}

// IsMultiUser tells whether clients of different user ids may run at the same time.
func (c *MPSConfig) IsMultiUser() bool { return c.MultiUser != nil && *c.MultiUser }

// MemoryLimits are the bytes of device memory that one client process may use on
// each device, by UUID. Devices without a limit are not in it.
//
// devices are the UUIDs in the claim's order, which is what indexes count. Only
// now can be told what the keys of the limits mean, so the error, an
// *InvalidError, names every key that means no device of the claim, or the same
// device as another key.
func (c *MPSConfig) MemoryLimits(devices []string) (map[string]int64, error) {
	mps := field.NewPath("sharing", "mpsConfig")
	limits := map[string]int64{}
	var faults field.ErrorList
	set := func(uuid string, limit MemoryLimit, at *field.Path) {
		bytes, err := limit.Bytes()
		if err != nil {
			faults = append(faults, field.Invalid(at, string(limit), err.Error()))
			return
		}
		limits[uuid] = bytes
	}
	if limit := c.DefaultPinnedDeviceMemoryLimit; limit != nil {
		for _, uuid := range devices {
			set(uuid, *limit, mps.Child("defaultPinnedDeviceMemoryLimit"))
		}
	}
	keys, there := map[string]string{}, ", which has "+deviceList(devices)
	perDevice := mps.Child("defaultPerDevicePinnedMemoryLimit")
	for _, key := range slices.Sorted(maps.Keys(c.DefaultPerDevicePinnedMemoryLimit)) {
		uuid, found := deviceOf(key, devices)
		if !found {
			faults = append(faults, field.Invalid(perDevice, key, "names no device of the claim"+there))
			there = "" // Said once is enough: keys are many, and anybody's.
			continue
		}
		if other, taken := keys[uuid]; taken {
			faults = append(faults, field.Invalid(perDevice, key,
				fmt.Sprintf("names the same device as %q, which is %s; keep one of the two", other, uuid)))
			continue
		}
		keys[uuid] = key
		set(uuid, c.DefaultPerDevicePinnedMemoryLimit[key], perDevice.Key(key))
	}
	if len(faults) > 0 {
		return nil, invalid("", faults)
	}
	return limits, nil
}

// deviceOf finds what a key of the limits means. UUIDs contain a "-" and are never
// numbers.
func deviceOf(key string, devices []string) (uuid string, found bool) {
	if index, err := strconv.ParseUint(key, 10, 16); err == nil {
		if index >= uint64(len(devices)) {
			return "", false
		}
		return devices[index], true
	}
	at := slices.IndexFunc(devices, func(uuid string) bool { return strings.EqualFold(uuid, key) })
	if at < 0 {
		return "", false
	}
	return devices[at], true
}

// deviceList says which keys there could be.
func deviceList(devices []string) string {
	if len(devices) == 0 {
		return "none"
	}
	texts := make([]string, len(devices))
	for i, uuid := range devices {
		texts[i] = fmt.Sprintf("%d: %s", i, uuid)
	}
	return strings.Join(texts, ", ")
}
