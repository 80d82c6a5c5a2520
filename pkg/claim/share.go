// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"fmt"
	"reflect"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Limits are what one claim may use of a share. Zero is no limit.
type Limits struct {
	// Percent is of the multiprocessors, 1 to 100.
	Percent int `json:"percent,omitempty"`
	// MemoryBytes is device memory.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
}

// limitsOf are what the scheduler has accounted to the claim for its share.
func limitsOf(result resourceapi.DeviceRequestAllocationResult, share *device.Share) Limits {
	l := Limits{Percent: share.DefaultPercent, MemoryBytes: share.DefaultMemoryBytes}
	if q, found := consumed(result, "smPercent"); found {
		l.Percent = int(min(q.Value(), 100))
	}
	if q, found := consumed(result, "memory"); found {
		l.MemoryBytes = q.Value()
	}
	return l
}

// consumed finds a capacity of this driver, with or without the driver's domain.
func consumed(result resourceapi.DeviceRequestAllocationResult, name string) (resource.Quantity, bool) {
	for _, key := range []string{name, result.Driver + "/" + name} {
		if q, found := result.ConsumedCapacity[resourceapi.QualifiedName(key)]; found {
			return q, true
		}
	}
	return resource.Quantity{}, false
}

// shareOut finds out which MPS sessions and time slices the steps of a plan need.
// The steps are in order.
func (p *Plan) shareOut() error {
	var own *Step // the first whole GPU with MPS of its own
	for i := range p.Steps {
		s := &p.Steps[i]
		switch {
		case s.Admin:
			continue
		case s.Device.Share != nil && s.ShareID == nil:
			return fmt.Errorf("device %s is shared and the claim's share has no ID: it was allocated without the feature gate DRAConsumableCapacity",
				s.Device.Name)
		case s.Device.Kind == device.MPS:
			s.session = &sessionPlan{id: s.Device.Share.Base, multiUser: true}
		case s.Device.Kind == device.TimeSlice:
			s.interval = s.Device.Share.Interval
		case s.Config == nil:
		case s.Config.MPS() != nil:
			if err := s.ownMPS(own); err != nil {
				return err
			}
			if own == nil && s.Device.Partition == nil {
				own = s
			}
		default:
			s.interval = sharing.Interval(s.Config.Interval())
		}
		if s.interval == policy.IntervalDefault {
			s.interval = ""
		}
	}
	return p.checkLimits()
}

// ownMPS puts the device of a step into a session of the claim's own: whole GPUs
// all into that of the first one, a partition into one for itself.
func (s *Step) ownMPS(first *Step) error {
	if err := s.checkMPS(); err != nil {
		return err
	}
	config := s.Config.MPS()
	if first == nil || s.Device.Partition != nil {
		s.session = &sessionPlan{id: s.Device.Name, multiUser: config.IsMultiUser(), config: config}
		return nil
	}
	// A class with a configuration comes with one for each of its requests.
	if !reflect.DeepEqual(first.Config.MPS(), config) {
		return fmt.Errorf("devices %s and %s have different configurations with strategy %q: a process can be a client of one MPS "+
			"daemon only. Use one configuration for both, with limits per device, or two claims", first.Device.Name, s.Device.Name, api.MPS)
	}
	s.session = first.session
	return nil
}

// checkLimits makes sure that limits are for devices of their configuration. The UUID
// of a partition is not known before it exists, so that only its index can be meant.
func (p *Plan) checkLimits() error {
	name := func(step int) string {
		if d := p.Steps[step].Device; d.Partition != nil {
			return d.Name
		}
		return p.Steps[step].Device.GPU.UUID
	}
	for _, s := range p.Steps {
		if s.session == nil || s.session.config == nil {
			continue
		}
		if _, err := s.session.config.MemoryLimits(p.configured(s.session, name)); err != nil {
			return fmt.Errorf("device %s: %w", s.Device.Name, err)
		}
	}
	return nil
}

// configured are the devices that the configuration of a session is for, as indexes in
// it count them: the session's, and partitions that have sessions of their own.
func (p *Plan) configured(session *sessionPlan, name func(step int) string) []string {
	var names []string
	for i, s := range p.Steps {
		if s.session != nil && (s.session == session || s.session.config == session.config) {
			names = append(names, name(i))
		}
	}
	return names
}

func (s *Step) checkMPS() error {
	var profile *gpu.Profile
	if s.Device.Partition != nil {
		profile = &s.Device.Partition.Profile
	}
	if s.Device.GPU.MPSClients(gpu.Version{}, profile) == 0 {
		return fmt.Errorf("device %s: its configuration asks for strategy %q, which needs compute capability 7.0; GPU %s (%s) has %d.%d",
			s.Device.Name, api.MPS, s.Device.GPU.PCIAddress, s.Device.GPU.ProductName,
			s.Device.GPU.ComputeCapability.Major, s.Device.GPU.ComputeCapability.Minor)
	}
	if s.Device.Static != nil {
		return fmt.Errorf("device %s: its configuration asks for strategy %q, and this driver does nothing to a partition that somebody else made",
			s.Device.Name, api.MPS)
	}
	return nil
}

// sessionPlan is an MPS session that one or several steps are in.
type sessionPlan struct {
	id        string
	multiUser bool
	// config is nil for shares, whose limits are the claims'.
	config *api.MPSConfig
}
