// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/quote"
)

// configs are the configurations of a claim for this driver, in rising
// precedence: those of classes, then those of the claim, each in their order.
type configs []*config

type config struct {
	entry resourceapi.DeviceAllocationConfiguration
	value api.Config
	// where is for messages.
	where string
	// applied and misfit are what was found among the devices that it was meant for.
	applied      bool
	misfit       *device.Device
	alternatives bool
}

// decodeConfigs checks every configuration for this driver, also those that
// another one takes precedence over: a fault must not come to light later.
func decodeConfigs(entries []resourceapi.DeviceAllocationConfiguration, driver string) (configs, error) {
	var all configs
	for i, entry := range entries {
		if entry.Opaque == nil || entry.Opaque.Driver != driver {
			continue
		}
		c := &config{entry: entry, where: fmt.Sprintf("configuration %d of the allocation (%s)", i, origin(entry))}
		value, err := api.Decode(entry.Opaque.Parameters)
		if err == nil {
			err = value.Validate()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.where, err)
		}
		c.value = value
		all = append(all, c)
	}
	slices.SortStableFunc(all, func(a, b *config) int { return cmp.Compare(a.rank(), b.rank()) })
	return all, nil
}

func origin(entry resourceapi.DeviceAllocationConfiguration) string {
	from := "of the claim"
	if entry.Source == resourceapi.AllocationConfigSourceClass {
		from = "of the device class"
	}
	if len(entry.Requests) == 0 {
		// It may be for all requests, or the allocation may just not name them.
		return from
	}
	return from + ", for requests " + quote.Names(entry.Requests)
}

func (c *config) ofClass() bool { return c.entry.Source == resourceapi.AllocationConfigSourceClass }

func (c *config) rank() int {
	if c.ofClass() {
		return 0
	}
	return 1
}

// choose returns the configuration with the highest precedence for a device, or
// nil.
//
// A configuration of the claim that names the request exactly must be of the
// device's kind. One that is for more (all requests, or all alternatives of a
// request), and one of a device class, counts for the devices of its kind only.
func (all configs) choose(result resourceapi.DeviceRequestAllocationResult, d device.Device) (api.Config, error) {
	var chosen *config
	for _, c := range all {
		entry := []resourceapi.DeviceAllocationConfiguration{c.entry}
		if len(resourceclaim.ConfigForResult(entry, result)) == 0 {
			continue
		}
		if fits(c.value, d) {
			if c.onlyObserves(result) {
				return nil, fmt.Errorf("%s: request %s has admin access, which changes nothing: device %s cannot be shared by it",
					c.where, quote.Name(result.Request), d.Name)
			}
			c.applied = true
			chosen = c
			continue
		}
		if !c.ofClass() && slices.Contains(c.entry.Requests, result.Request) {
			return nil, c.doesNotFit(d)
		}
		c.misfit = &d
		c.alternatives = c.alternatives || strings.Contains(result.Request, "/")
	}
	if chosen == nil {
		return nil, nil
	}
	return chosen.value, nil
}

// onlyObserves reports whether a configuration of the claim asks for something by the
// name of a request with admin access.
func (c *config) onlyObserves(result resourceapi.DeviceRequestAllocationResult) bool {
	return !c.ofClass() && ptr.Deref(result.AdminAccess, false) && slices.Contains(c.entry.Requests, result.Request) &&
		(c.value.MPS() != nil || c.value.Interval() != api.IntervalDefault)
}

// checkUse refuses a claim's configuration that found only devices of another
// kind: it asks for something that would silently not happen. A claim with
// alternatives may carry one for each of them.
func (all configs) checkUse() error {
	for _, c := range all {
		if !c.ofClass() && !c.applied && c.misfit != nil && !c.alternatives {
			return c.doesNotFit(*c.misfit)
		}
	}
	return nil
}

func (c *config) doesNotFit(d device.Device) error {
	var is string
	switch d.Kind {
	case device.Whole:
		is = "a whole GPU and takes a " + api.GpuConfigKind
	case device.Partition:
		is = "a MIG partition and takes a " + api.MigDeviceConfigKind
	case device.Observer:
		is = "for observation only"
	case device.MPS:
		takes := api.GpuConfigKind
		if d.Partition != nil {
			takes = api.MigDeviceConfigKind
		}
		is = "a share: its limits are what the claim asks for in capacity.requests, and it takes a " + takes + " with nothing but sharing.mpsConfig.defaultClientPriority"
	default:
		is = "a share: how it is shared is for the administrator's SharingPolicy to say"
	}
	return fmt.Errorf("%s: %s does not apply to device %s, which is %s", c.where, c.kind(), d.Name, is)
}

func (c *config) kind() string {
	if _, isGpu := c.value.(*api.GpuConfig); isGpu {
		return api.GpuConfigKind
	}
	return api.MigDeviceConfigKind
}

func fits(value api.Config, d device.Device) bool {
	kind := device.Whole
	if _, isMIG := value.(*api.MigDeviceConfig); isMIG {
		kind = device.Partition
	}
	if d.Kind == device.MPS {
		// The scheduler has accounted the limits of a share, and the policy says the rest.
		return (kind == device.Partition) == (d.Partition != nil) && value.MPS() != nil && value.MPS().OnlyClientPriority()
	}
	return d.Kind == kind
}
