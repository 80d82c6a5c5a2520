// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package plan works out what an allocated claim means on this node. It is pure: the allocation, the configurations and the
// inventory give the record, which package converge then makes true.
package plan

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Node is what a claim is planned for.
type Node struct {
	// Results of other drivers are ignored.
	Driver, Pool, BootID string
	// Inventory holds the devices that this node publishes.
	Inventory *device.Inventory
}

// allocated is a device of the claim: what is recorded of it, and what else decides how it is shared.
type allocated struct {
	record.Device
	published device.Device
	// config is nil where no configuration applies.
	config api.Config
}

// New returns what is written down when the preparation of all devices starts. They are in the order in which they are
// made: by PCI address, then the whole GPU, then partitions by placement; one that is only observed comes last in its place.
//
// Errors are about the claim (not allocated, a configuration that is invalid, not supported or for another kind of device) or
// about a device that the node does not have. Without devices of this driver the record has none.
func New(claim *resourceapi.ResourceClaim, node Node) (*record.Record, error) {
	all, err := node.find(claim)
	if err != nil {
		return nil, err
	}
	r := &record.Record{
		Claim: record.Ref{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}, State: record.Preparing, BootID: node.BootID,
	}
	for i := range all {
		d := &all[i]
		if same := r.Device(d.Key()); same != nil && d.Admin {
			// It observes what another request has, for which that one decides.
			same.Requests = append(same.Requests, d.Requests...)
			continue
		}
		if err := d.share(r, all); err != nil {
			return nil, err
		}
		for j := range r.Devices {
			// No scheduler should have allocated that.
			if other := &r.Devices[j]; overlap(&d.Device, other) {
				return nil, fmt.Errorf("the claim is allocated %s and %s, which overlap", other.Device, d.published.Name)
			}
		}
		if share := d.published.Share; share != nil && !d.Admin && !slices.Contains(node.Inventory.Withdrawn(), d.published.Name) {
			d.Clients = share.Clients
		}
		r.Devices = append(r.Devices, d.Device)
	}
	return r, nil
}

// find looks up the devices of a claim and the configuration of each, in the order in which they are made.
func (node Node) find(claim *resourceapi.ResourceClaim) ([]allocated, error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated")
	}
	configs, err := decode(claim.Status.Allocation.Devices.Config, node.Driver)
	if err != nil {
		return nil, err
	}
	var all []allocated
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != node.Driver {
			continue
		}
		d, err := node.lookUp(result)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	for i := range configs {
		if err := configs[i].apply(all); err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(all, func(a, b allocated) int {
		return cmp.Or(
			gpu.ComparePCIAddresses(a.PCIAddress, b.PCIAddress),
			cmp.Compare(a.place(), b.place()),
			cmp.Compare(a.published.Name, b.published.Name),
			cmp.Compare(ptr.Deref(a.ShareID, ""), ptr.Deref(b.ShareID, "")),
		)
	})
	return all, nil
}

// place orders devices: a whole GPU before its partitions, and devices with admin access after those that have to be made.
func (d *allocated) place() int {
	place := 0
	if d.Partition != nil {
		place = 2 * (1 + d.Partition.Start)
	}
	if d.Admin {
		place++
	}
	return place
}

func (node Node) lookUp(result resourceapi.DeviceRequestAllocationResult) (allocated, error) {
	if result.Pool != node.Pool {
		return allocated{}, fmt.Errorf("device %s is allocated from pool %s, this node's is %q", quote.Name(result.Device), quote.Text(result.Pool), node.Pool)
	}
	published, found := node.Inventory.Lookup(result.Device)
	if !found {
		return allocated{}, fmt.Errorf("device %s does not exist on this node: its GPU is missing or does not answer, "+
			"or it was published under another name before", quote.Name(result.Device))
	}
	d := allocated{published: published, Device: record.Device{
		Requests: []string{result.Request}, Pool: result.Pool, Device: published.Name, ShareID: result.ShareID,
		Admin: ptr.Deref(result.AdminAccess, false), Type: published.Kind, PCIAddress: published.GPU.PCIAddress,
		DynamicMIG: published.GPU.MIG != nil && published.GPU.MIG.Dynamic, Divisible: published.GPU.MIG != nil,
	}}
	if shape := published.Partition; shape != nil {
		d.Partition = &record.Partition{Profile: shape.Profile.Name, Place: record.Place{ProfileID: shape.Profile.ID, Placement: shape.Placement}}
	}
	switch {
	case published.Static != nil:
		d.Type = record.Static
	case published.Kind == device.Observer:
		d.Type = device.Whole // admin access says the rest
	}
	var err error
	switch {
	case d.Admin:
	case published.Kind == device.Observer:
		err = fmt.Errorf("device %s is for claims that observe its GPU, and request %s has no admin access: "+
			"set adminAccess: true in the request, in a namespace with the label %s: \"true\", or use another device class",
			published.Name, quote.Name(result.Request), resourceapi.DRAAdminNamespaceLabelKey)
	case published.Share != nil:
		d.Sharing, err = shareOf(published, result)
	}
	return d, err
}

// shareOf returns what is done for a share: what its policy says, and the limits that the scheduler has accounted to the
// claim. It is nil where nothing is done.
func shareOf(d device.Device, result resourceapi.DeviceRequestAllocationResult) (*record.Sharing, error) {
	if result.ShareID == nil {
		return nil, fmt.Errorf("device %s is shared and the claim's share has no ID: it was allocated without the feature gate DRAConsumableCapacity", d.Name)
	}
	percent, percentErr := accounted(d, result, "smPercent", int64(d.Share.DefaultPercent), percentOf)
	memory, memoryErr := accounted(d, result, "memory", d.Share.DefaultMemoryBytes, api.MemoryBytes)
	if err := cmp.Or(percentErr, memoryErr); err != nil {
		return nil, err
	}
	s := &record.Sharing{
		UUID: d.GPU.UUID, Limits: record.Limits{Percent: int(percent), MemoryBytes: memory},
		// One of which no memory was counted has no limits to be held to.
		Limited: d.Share.Limited && memory > 0,
	}
	if d.Share.Held && memory > 0 {
		s.GuaranteedBytes = d.Share.Guaranteed(memory)
	}
	switch {
	case d.Kind == device.MPS:
		s.Session = d.Share.Base
		if d.Share.OnClientKilled == policy.KilledRestart {
			s.OnClientKilled = policy.KilledRestart
		}
	case d.Share.Interval != policy.IntervalDefault:
		s.Interval = d.Share.Interval
	case !s.Limited && s.GuaranteedBytes == 0:
		return nil, nil
	}
	return s, nil
}

// accounted returns what the scheduler has counted of a capacity, by its name with or without the driver's domain, or the
// default. It is an error if it is an amount that MPS cannot be told. Of turns it is nothing where nothing limited them when
// they were allocated.
func accounted(d device.Device, result resourceapi.DeviceRequestAllocationResult, capacity string, otherwise int64,
	parse func(resource.Quantity) (int64, error),
) (int64, error) {
	for _, name := range []string{capacity, result.Driver + "/" + capacity} {
		q, found := result.ConsumedCapacity[resourceapi.QualifiedName(name)]
		switch {
		case !found:
			continue
		case d.Kind == device.TimeSlice && q.IsZero():
			return 0, nil
		}
		amount, err := parse(q)
		if err != nil {
			return 0, fmt.Errorf("request %s was allocated a share of device %s with capacity %s: Invalid value: %s: %w; "+
				"make the claim again, so that it is allocated again",
				quote.Name(result.Request), d.Name, name, quote.Text(q.String()), err)
		}
		return amount, nil
	}
	return otherwise, nil
}

func percentOf(q resource.Quantity) (int64, error) {
	if q.CmpInt64(1) < 0 || q.CmpInt64(100) > 0 {
		return 0, errors.New("must be between 1 and 100")
	}
	return q.Value(), nil
}

// share writes down the time slice that the device needs, or the MPS session that it is in.
func (d *allocated) share(r *record.Record, all []allocated) error {
	var session record.Session
	in := record.SessionDevice{Device: d.published.Name, PCIAddress: d.PCIAddress}
	switch mps := d.mps(); {
	case d.Admin:
	case d.published.Kind == device.MPS:
		d.Sharing.ClientPriority = priority(mps, d.published.Share.ClientPriority)
		session = record.Session{ID: d.Sharing.Session, Shared: true, MultiUser: true}
	case mps != nil:
		id, limits, err := d.ownSession(all)
		if err != nil {
			return err
		}
		d.Sharing = &record.Sharing{UUID: d.published.GPU.UUID, Session: id}
		session = record.Session{ID: id, MultiUser: mps.IsMultiUser(), Percent: mps.ThreadPercentage(), ClientPriority: priority(mps, "")}
		in.MemoryBytes = limits[d.configName()]
	case d.config != nil && d.config.Interval() != api.IntervalDefault:
		d.Sharing = &record.Sharing{UUID: d.published.GPU.UUID, Interval: policy.Interval(d.config.Interval())}
	}
	if session.ID == "" {
		return nil
	}
	if d.Partition == nil {
		in.UUID = d.published.GPU.UUID
	}
	s := r.Session(session.ID)
	if s == nil {
		r.Sessions = append(r.Sessions, session)
		s = &r.Sessions[len(r.Sessions)-1]
	}
	// Two shares of one device are in the session once.
	if !slices.Contains(s.Devices, in) {
		s.Devices = append(s.Devices, in)
	}
	return nil
}

// mps is what the configuration asks for MPS, or nil.
func (d *allocated) mps() *api.MPSConfig {
	if d.config == nil || d.Admin {
		return nil
	}
	return d.config.MPS()
}

// ownSession returns the claim's own session for the device, and the limits of memory in it by configName: whole GPUs are
// all in that of the first one, a partition is in one for itself. Indexes in the configuration count the devices that it is
// for: the session's, and partitions that have sessions of their own.
func (d *allocated) ownSession(all []allocated) (id string, limits map[string]int64, err error) {
	if err := d.checkMPS(); err != nil {
		return "", nil, err
	}
	id = d.published.Name
	var names []string
	for i := range all {
		other := &all[i]
		switch {
		case other.mps() == nil, other.published.Kind != d.published.Kind, d.Partition != nil && other.config != d.config:
			continue
		case d.Partition == nil && len(names) == 0:
			id = other.published.Name
		}
		// A class with a configuration comes with one for each of its requests.
		if !reflect.DeepEqual(other.mps(), d.mps()) {
			return "", nil, fmt.Errorf("devices %s and %s have different configurations with strategy %q: a process can be a client of one MPS "+
				"daemon only. Use one configuration for both, with limits per device, or two claims", d.published.Name, other.published.Name, api.MPS)
		}
		names = append(names, other.configName())
	}
	if limits, err = d.mps().MemoryLimits(names); err != nil {
		return "", nil, fmt.Errorf("device %s: %w", d.published.Name, err)
	}
	return id, limits, nil
}

func (d *allocated) checkMPS() error {
	g, name := d.published.GPU, d.published.Name
	var profile *gpu.Profile // nil for the whole GPU
	if d.published.Partition != nil {
		profile = &d.published.Partition.Profile
	}
	if g.MPSClients(gpu.Version{}, profile) == 0 {
		return fmt.Errorf("device %s: its configuration asks for strategy %q, which needs compute capability 7.0; GPU %s (%s) has %d.%d",
			name, api.MPS, g.PCIAddress, g.ProductName, g.ComputeCapability.Major, g.ComputeCapability.Minor)
	}
	if d.published.Static != nil {
		return fmt.Errorf("device %s: its configuration asks for strategy %q, and this driver does nothing to a partition that somebody else made",
			name, api.MPS)
	}
	return nil
}

// configName is what a configuration can call the device besides its index. The UUID of a partition is not known yet.
func (d *allocated) configName() string {
	if d.Partition != nil {
		return d.published.Name
	}
	return d.published.GPU.UUID
}

// priority is the one that the configuration asks for, otherwise the policy's. Normal is not written down: it needs nothing.
func priority(config *api.MPSConfig, otherwise policy.ClientPriority) policy.ClientPriority {
	if config != nil && config.DefaultClientPriority != nil {
		otherwise = policy.ClientPriority(*config.DefaultClientPriority)
	}
	if otherwise != policy.PriorityBelowNormal {
		return ""
	}
	return otherwise
}

// overlap reports whether two devices of a claim use the same part of a GPU: each of its shares of a device is another one.
func overlap(a, b *record.Device) bool {
	return a.Conflicts(b) || a.SameDevice(b) && a.Key() == b.Key()
}
