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
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// ThreadPercentage returns the part of the multiprocessors that one client process
// may use, 1 to 100, or 0 for no limit.
func (c *MPSConfig) ThreadPercentage() int { return ptr.Deref(c.DefaultActiveThreadPercentage, 0) }

// IsMultiUser reports whether clients of different user ids may run at the same time.
func (c *MPSConfig) IsMultiUser() bool { return ptr.Deref(c.MultiUser, false) }

// MemoryLimits returns how many bytes of device memory one client process may use on
// each device, by UUID. It has no entry for a device without a limit.
//
// devices are the UUIDs in the claim's order, which the indexes refer to. The error is
// an *InvalidError: it names every key that is no device of the claim, or the same
// device as another key. Validate cannot know these.
func (c *MPSConfig) MemoryLimits(devices []string) (map[string]int64, error) {
	mps := field.NewPath("sharing", "mpsConfig")
	limits := map[string]int64{}
	var faults field.ErrorList
	set := func(uuid string, limit MemoryLimit, at *field.Path) {
		faults = append(faults, validateMemory(limit, at)...)
		limits[uuid], _ = limit.Bytes()
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
			faults = append(faults, field.Invalid(perDevice, quote.Short(key), "names no device of the claim"+there))
			there = "" // Once is enough: a tenant may give many keys.
			continue
		}
		if other, taken := keys[uuid]; taken {
			faults = append(faults, field.Invalid(perDevice, quote.Short(key),
				fmt.Sprintf("names the same device as %s, which is %s; keep one of the two", quote.Text(other), uuid)))
			continue
		}
		keys[uuid] = key
		set(uuid, c.DefaultPerDevicePinnedMemoryLimit[key], perDevice.Key(quote.Name(key)))
	}
	if len(faults) > 0 {
		return nil, invalid("", faults)
	}
	return limits, nil
}

// deviceOf returns the device that a key of the limits refers to. UUIDs contain a "-"
// and are never numbers.
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

// deviceList lists the possible keys.
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
