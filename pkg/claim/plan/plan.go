// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/quote"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Plan is what a claim's allocation means on this node.
type Plan struct {
	// Record is what the journal says when the preparation of all devices has begun.
	// They are in the order in which they are made: by PCI address, then the whole GPU,
	// then partitions by placement; one that is only observed comes last in its place.
	Record *record.Record
	// MaxShares is how many claims can have a share of a device, by its name. A device
	// that the policy has withdrawn is not in it: claims keep what they had.
	MaxShares map[string]int
}

// Node is what a claim is planned for.
type Node struct {
	// Driver and Pool are those of the allocation results that count. Results of
	// other drivers are ignored.
	Driver, Pool string
	BootID       string
	// Inventory holds the devices that this node publishes.
	Inventory *device.Inventory
}

// allocated is one device of the allocation.
type allocated struct {
	requests []string
	pool     string
	device   device.Device
	// shareID is set for a share of a device.
	shareID *types.UID
	// admin marks a device that is only observed.
	admin bool
	// config is nil where no configuration applies.
	config api.Config
	// limits are those of a share.
	limits record.Limits
	// session is the MPS session that the device is in, or nil. Several devices can
	// be in one.
	session *session
	// interval is the time slice that has to be set, or empty.
	interval sharing.Interval
}

// New plans a claim. Errors are about the claim (not allocated, a configuration that is
// invalid, not supported or for another kind of device) or about a device that the node
// does not have.
//
// A claim without devices of this driver gives a record without devices.
func New(claim *resourceapi.ResourceClaim, node Node) (*Plan, error) {
	all, err := allocatedTo(claim, node)
	if err != nil {
		return nil, err
	}
	if err := all.share(); err != nil {
		return nil, err
	}
	plan := &Plan{
		Record:    record.New(record.Ref{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}, node.BootID),
		MaxShares: all.maxShares(node.Inventory.Withdrawn()),
	}
	if err := all.record(plan.Record); err != nil {
		return nil, err
	}
	return plan, checkOverlap(plan.Record.Devices)
}

// allocatedTo finds the devices of a claim and the configuration of each.
func allocatedTo(claim *resourceapi.ResourceClaim, node Node) (devices, error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated")
	}
	allocation := claim.Status.Allocation.Devices
	configs, err := decodeConfigs(allocation.Config, node.Driver)
	if err != nil {
		return nil, err
	}
	var all devices
	for _, result := range allocation.Results {
		if result.Driver != node.Driver {
			continue
		}
		d, err := lookup(result, node)
		if err != nil {
			return nil, err
		}
		if d.config, err = configs.choose(result, d.device); err != nil {
			return nil, err
		}
		all.add(d)
	}
	if err := configs.checkUse(); err != nil {
		return nil, err
	}
	slices.SortFunc(all, compare)
	return all, nil
}

func lookup(result resourceapi.DeviceRequestAllocationResult, node Node) (allocated, error) {
	if result.Pool != node.Pool {
		return allocated{}, fmt.Errorf("device %s is allocated from pool %s, this node's is %q", quote.Name(result.Device), quote.Text(result.Pool), node.Pool)
	}
	d, found := node.Inventory.Lookup(result.Device)
	if !found {
		return allocated{}, fmt.Errorf("device %s does not exist on this node: its GPU is missing or does not answer, "+
			"or it was published under another name before", quote.Name(result.Device))
	}
	a := allocated{
		requests: []string{result.Request},
		pool:     result.Pool,
		device:   d,
		shareID:  result.ShareID,
		admin:    ptr.Deref(result.AdminAccess, false),
	}
	if d.Kind == device.Observer && !a.admin {
		return allocated{}, fmt.Errorf("device %s is for claims that observe its GPU, and request %s has no admin access: "+
			"set adminAccess: true in the request, in a namespace with the label %s: \"true\", or use another device class",
			d.Name, quote.Name(result.Request), resourceapi.DRAAdminNamespaceLabelKey)
	}
	if d.Share != nil && !a.admin {
		var err error
		if a.limits, err = limitsOf(result, d); err != nil {
			return allocated{}, err
		}
	}
	return a, nil
}

// devices are the devices of a claim.
type devices []allocated

// add takes one device only once: an admin request may name a device that another request
// of the claim has as well. What is done to the device is what the other one asks for.
func (all *devices) add(d allocated) {
	for i := range *all {
		same := &(*all)[i]
		if same.device.Name != d.device.Name || !ptr.Equal(same.shareID, d.shareID) {
			continue
		}
		requests := append(same.requests, d.requests...)
		if same.admin && !d.admin {
			*same = d
		}
		same.requests = requests
		return
	}
	*all = append(*all, d)
}

func compare(a, b allocated) int {
	return cmp.Or(
		gpu.ComparePCIAddresses(a.device.GPU.PCIAddress, b.device.GPU.PCIAddress),
		cmp.Compare(start(a.device), start(b.device)),
		cmp.Compare(oneIf(a.admin), oneIf(b.admin)),
		cmp.Compare(a.device.Name, b.device.Name),
		cmp.Compare(ptr.Deref(a.shareID, ""), ptr.Deref(b.shareID, "")),
	)
}

func oneIf(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// start puts a whole GPU before its partitions.
func start(d device.Device) int {
	if d.Partition == nil {
		return -1
	}
	return d.Partition.Placement.Start
}

// checkOverlap finds what no scheduler should have allocated.
func checkOverlap(devices []record.Device) error {
	for i := range devices {
		for j := range i {
			if overlap(&devices[i], &devices[j]) {
				return fmt.Errorf("the claim is allocated %s and %s, which overlap", devices[j].Device, devices[i].Device)
			}
		}
	}
	return nil
}

func (all devices) maxShares(withdrawn []string) map[string]int {
	shares := map[string]int{}
	for _, d := range all {
		if d.device.Share != nil && !d.admin && !slices.Contains(withdrawn, d.device.Name) {
			shares[d.device.Name] = d.device.Share.Clients
		}
	}
	return shares
}

// record writes down what will be done.
func (all devices) record(r *record.Record) error {
	for _, d := range all {
		r.Add(d.record())
	}
	return all.recordSessions(r)
}

func (d *allocated) record() record.Device {
	recorded := record.Device{
		Requests:   d.requests,
		Pool:       d.pool,
		Device:     d.device.Name,
		ShareID:    d.shareID,
		Admin:      d.admin,
		Type:       d.device.Kind,
		PCIAddress: d.device.GPU.PCIAddress,
		DynamicMIG: d.device.GPU.MIG != nil && d.device.GPU.MIG.Dynamic,
		Divisible:  d.device.GPU.MIG != nil,
		Sharing:    d.recordSharing(),
	}
	if d.device.Kind == device.Observer {
		// Admin access says the rest.
		recorded.Type = device.Whole
	}
	if shape := d.device.Partition; shape != nil {
		recorded.Partition = &record.Partition{Profile: shape.Profile.Name, ProfileID: shape.Profile.ID, Placement: shape.Placement}
	}
	if d.device.Static != nil {
		recorded.Type = record.Static
	}
	return recorded
}
