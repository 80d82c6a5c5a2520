// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// config is a configuration of a claim, or of a class that it asks for.
type config struct {
	resourceapi.DeviceAllocationConfiguration
	value api.Config
	// partitions says that it is for partitions, not for GPUs.
	partitions bool
	// where is for messages.
	where string
}

// decode returns the configurations for this driver in rising precedence: those of classes, then those of the claim, each
// in their order. It checks all, also those that another one takes precedence over: a fault must not come to light later.
func decode(entries []resourceapi.DeviceAllocationConfiguration, driver string) ([]config, error) {
	var ofClasses, ofClaim []config
	for i, entry := range entries {
		if entry.Opaque == nil || entry.Opaque.Driver != driver {
			continue
		}
		c := config{DeviceAllocationConfiguration: entry}
		same, from := &ofClaim, "of the claim"
		if c.ofClass() {
			same, from = &ofClasses, "of the device class"
		}
		// Without names it may be for all requests, or the allocation may just not name them.
		if len(entry.Requests) > 0 {
			from += ", for requests " + quote.Names(entry.Requests)
		}
		c.where = fmt.Sprintf("configuration %d of the allocation (%s)", i, from)
		var err error
		if c.value, err = api.Decode(entry.Opaque.Parameters); err == nil {
			err = c.value.Validate()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.where, err)
		}
		_, c.partitions = c.value.(*api.MigDeviceConfig)
		*same = append(*same, c)
	}
	return append(ofClasses, ofClaim...), nil
}

func (c *config) ofClass() bool { return c.Source == resourceapi.AllocationConfigSourceClass }

// apply gives the configuration to the devices that it is for, in place of one with lower precedence.
//
// One of the claim that names the request exactly must be of the device's kind. One that is for more (all requests, or all
// alternatives of a request), and one of a class, counts for the devices of its kind only. One of the claim that finds only
// devices of another kind asks for something that would silently not happen, unless these are alternatives: a claim may
// carry one for each of them.
func (c *config) apply(all []allocated) error {
	only := []resourceapi.DeviceAllocationConfiguration{c.DeviceAllocationConfiguration}
	var misfit *allocated
	excused := c.ofClass()
	for i := range all {
		d := &all[i]
		request := d.Requests[0]
		named := !c.ofClass() && slices.Contains(c.Requests, request)
		if len(resourceclaim.ConfigForResult(only, resourceapi.DeviceRequestAllocationResult{Request: request})) == 0 {
			continue
		}
		switch {
		case !c.fits(d.published) && named:
			return c.doesNotFit(d.published)
		case !c.fits(d.published):
			misfit, excused = d, excused || strings.Contains(request, "/")
		case named && d.Admin && (c.value.MPS() != nil || c.value.Interval() != api.IntervalDefault):
			return fmt.Errorf("%s: request %s has admin access, which changes nothing: device %s cannot be shared by it",
				c.where, quote.Name(request), d.published.Name)
		default:
			d.config, excused = c.value, true
		}
	}
	if misfit != nil && !excused {
		return c.doesNotFit(misfit.published)
	}
	return nil
}

func (c *config) fits(d device.Device) bool {
	mps := c.value.MPS()
	// The scheduler has accounted the limits of a share, and the policy says the rest.
	return c.partitions == (d.Partition != nil) &&
		(d.Kind == device.Whole || d.Kind == device.Partition || d.Kind == device.MPS && mps != nil && mps.OnlyClientPriority())
}

func (c *config) doesNotFit(d device.Device) error {
	takes := kindFor(d.Partition != nil)
	var is string
	switch d.Kind {
	case device.Whole:
		is = "a whole GPU and takes a " + takes
	case device.Partition:
		is = "a MIG partition and takes a " + takes
	case device.Observer:
		is = "for observation only"
	case device.MPS:
		is = "a share: its limits are what the claim asks for in capacity.requests, and it takes a " + takes + " with nothing but sharing.mpsConfig.defaultClientPriority"
	default:
		is = "a share: how it is shared is for the administrator's SharingPolicy to say"
	}
	return fmt.Errorf("%s: %s does not apply to device %s, which is %s", c.where, kindFor(c.partitions), d.Name, is)
}

func kindFor(partitions bool) string {
	if partitions {
		return api.MigDeviceConfigKind
	}
	return api.GpuConfigKind
}
