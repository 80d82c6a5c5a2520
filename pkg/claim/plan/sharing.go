// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/quote"
	"github.com/partage-dev/partage/pkg/sharing"
)

// limitsOf returns what the scheduler has accounted to the claim for its share. It is an error
// if it is an amount that MPS cannot be told.
func limitsOf(result resourceapi.DeviceRequestAllocationResult, d device.Device) (record.Limits, error) {
	percent, percentErr := counted(result, d, "smPercent", int64(d.Share.DefaultPercent), percentOf)
	memory, memoryErr := counted(result, d, "memory", d.Share.DefaultMemoryBytes, api.MemoryBytes)
	return record.Limits{Percent: int(percent), MemoryBytes: memory}, cmp.Or(percentErr, memoryErr)
}

// counted returns what was accounted of one capacity. Of turns it is nothing where nothing limited
// them when they were allocated.
func counted(result resourceapi.DeviceRequestAllocationResult, d device.Device, name string, fallback int64,
	parse func(resource.Quantity) (int64, error),
) (int64, error) {
	key, q, found := consumed(result, name)
	switch {
	case !found:
		return fallback, nil
	case d.Kind == device.TimeSlice && q.IsZero():
		return 0, nil
	}
	amount, err := parse(q)
	if err != nil {
		return 0, wrongAmount(result, key, q, err)
	}
	return amount, nil
}

func percentOf(q resource.Quantity) (int64, error) {
	if q.CmpInt64(1) < 0 || q.CmpInt64(100) > 0 {
		return 0, errors.New("must be between 1 and 100")
	}
	return q.Value(), nil
}

func wrongAmount(result resourceapi.DeviceRequestAllocationResult, name string, q resource.Quantity, err error) error {
	return fmt.Errorf("request %s was allocated a share of device %s with capacity %s: Invalid value: %s: %w; "+
		"make the claim again, so that it is allocated again",
		quote.Name(result.Request), quote.Name(result.Device), name, quote.Text(q.String()), err)
}

// consumed finds a capacity of this driver, with or without the driver's domain, and its name.
func consumed(result resourceapi.DeviceRequestAllocationResult, name string) (string, resource.Quantity, bool) {
	for _, key := range []string{name, result.Driver + "/" + name} {
		if q, found := result.ConsumedCapacity[resourceapi.QualifiedName(key)]; found {
			return key, q, true
		}
	}
	return "", resource.Quantity{}, false
}

// session is an MPS session that one or several devices are in.
type session struct {
	id        string
	multiUser bool
	// config is nil for shares, whose limits are the claims'.
	config *api.MPSConfig
}

// share finds out which MPS sessions and time slices the devices need. They are in
// order.
func (all devices) share() error {
	var first *allocated // whole GPU with MPS of its own
	for i := range all {
		d := &all[i]
		switch {
		case d.admin:
			continue
		case d.device.Share != nil && d.shareID == nil:
			return fmt.Errorf("device %s is shared and the claim's share has no ID: it was allocated without the feature gate DRAConsumableCapacity",
				d.device.Name)
		case d.device.Kind == device.MPS:
			d.session = &session{id: d.device.Share.Base, multiUser: true}
		case d.device.Kind == device.TimeSlice:
			d.interval = d.device.Share.Interval
		case d.config == nil:
		case d.config.MPS() != nil:
			if err := d.joinOwnSession(first); err != nil {
				return err
			}
			if first == nil && d.device.Partition == nil {
				first = d
			}
		default:
			d.interval = sharing.Interval(d.config.Interval())
		}
		if d.interval == policy.IntervalDefault {
			d.interval = ""
		}
	}
	return nil
}

// joinOwnSession puts the device into a session of the claim's own: whole GPUs all
// into that of the first one, a partition into one for itself.
func (d *allocated) joinOwnSession(first *allocated) error {
	if err := d.checkMPS(); err != nil {
		return err
	}
	config := d.config.MPS()
	if first == nil || d.device.Partition != nil {
		d.session = &session{id: d.device.Name, multiUser: config.IsMultiUser(), config: config}
		return nil
	}
	// A class with a configuration comes with one for each of its requests.
	if !reflect.DeepEqual(first.config.MPS(), config) {
		return fmt.Errorf("devices %s and %s have different configurations with strategy %q: a process can be a client of one MPS "+
			"daemon only. Use one configuration for both, with limits per device, or two claims", first.device.Name, d.device.Name, api.MPS)
	}
	d.session = first.session
	return nil
}

func (d *allocated) checkMPS() error {
	var profile *gpu.Profile
	if d.device.Partition != nil {
		profile = &d.device.Partition.Profile
	}
	if d.device.GPU.MPSClients(gpu.Version{}, profile) == 0 {
		return fmt.Errorf("device %s: its configuration asks for strategy %q, which needs compute capability 7.0; GPU %s (%s) has %d.%d",
			d.device.Name, api.MPS, d.device.GPU.PCIAddress, d.device.GPU.ProductName,
			d.device.GPU.ComputeCapability.Major, d.device.GPU.ComputeCapability.Minor)
	}
	if d.device.Static != nil {
		return fmt.Errorf("device %s: its configuration asks for strategy %q, and this driver does nothing to a partition that somebody else made",
			d.device.Name, api.MPS)
	}
	return nil
}

// recordSharing returns nil for a device that nothing is done to.
func (d *allocated) recordSharing() *record.Sharing {
	s := &record.Sharing{UUID: d.device.GPU.UUID, Limits: d.limits, Interval: d.interval}
	if d.session != nil {
		s.Session = d.session.id
	}
	if d.device.Share != nil {
		// A share of which no memory was counted has no limits to be held to.
		s.Limited = d.device.Share.Limited && d.limits.MemoryBytes > 0
	}
	if d.session != nil && d.device.Share != nil && d.device.Share.OnClientKilled == policy.KilledRestart {
		s.OnClientKilled = policy.KilledRestart
	}
	if d.session != nil && d.device.Share != nil && d.clientPriority() == policy.PriorityBelowNormal {
		s.ClientPriority = policy.PriorityBelowNormal
	}
	if s.Session == "" && s.Interval == "" && !s.Limited {
		return nil
	}
	return s
}

// clientPriority is the one that the configuration asks for, otherwise the policy's for
// shares. Empty is normal.
func (d *allocated) clientPriority() policy.ClientPriority {
	if d.config != nil {
		if config := d.config.MPS(); config != nil && config.DefaultClientPriority != nil {
			return policy.ClientPriority(*config.DefaultClientPriority)
		}
	}
	if d.device.Share != nil {
		return d.device.Share.ClientPriority
	}
	return ""
}

// recordSessions writes down the sessions and which devices are in them.
func (all devices) recordSessions(r *record.Record) error {
	for i := range all {
		d := &all[i]
		if d.session == nil {
			continue
		}
		limits, err := all.memoryLimits(d.session)
		if err != nil {
			return fmt.Errorf("device %s: %w", d.device.Name, err)
		}
		s := r.Session(d.session.id)
		if s == nil {
			r.Sessions = append(r.Sessions, record.Session{ID: d.session.id, Shared: d.device.Share != nil, MultiUser: d.session.multiUser})
			s = &r.Sessions[len(r.Sessions)-1]
			if d.session.config != nil {
				s.Percent = d.session.config.ThreadPercentage()
				if d.clientPriority() == policy.PriorityBelowNormal {
					s.ClientPriority = policy.PriorityBelowNormal
				}
			}
		}
		in := record.SessionDevice{
			Device: d.device.Name, PCIAddress: d.device.GPU.PCIAddress, UUID: d.device.GPU.UUID, MemoryBytes: limits[d.configName()],
		}
		if d.device.Partition != nil {
			in.UUID = ""
		}
		// Two shares of one device are in the session once.
		if !slices.ContainsFunc(s.Devices, func(other record.SessionDevice) bool { return other.Device == in.Device }) {
			s.Devices = append(s.Devices, in)
		}
	}
	return nil
}

// memoryLimits are those that the configuration of a session sets, by configName.
// Indexes in it count the devices that it is for: the session's, and partitions that
// have sessions of their own.
func (all devices) memoryLimits(s *session) (map[string]int64, error) {
	if s.config == nil {
		return nil, nil
	}
	var names []string
	for i := range all {
		if d := &all[i]; d.session != nil && (d.session == s || d.session.config == s.config) {
			names = append(names, d.configName())
		}
	}
	return s.config.MemoryLimits(names)
}

// configName is what a configuration can call a device besides its index. The UUID of
// a partition is not known before it exists.
func (d *allocated) configName() string {
	if d.device.Partition != nil {
		return d.device.Name
	}
	return d.device.GPU.UUID
}
