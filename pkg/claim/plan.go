// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Ref names a claim.
type Ref struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
}

func (r Ref) String() string { return fmt.Sprintf("%s/%s (%s)", r.Namespace, r.Name, r.UID) }

// Plan is what a claim's allocation means on this node.
type Plan struct {
	Claim Ref
	// Steps are in the order in which they are taken: by PCI address, then the
	// whole GPU, then partitions by placement; who only observes one comes last there.
	Steps []Step

	// again says that the claim had all of it before the machine was started anew.
	again bool
}

// Step is one device of a plan.
type Step struct {
	// Requests are the names of the requests, or "request/subrequest", that the
	// device was allocated for.
	Requests []string
	Pool     string
	Device   device.Device
	// ShareID is set for a share of a device.
	ShareID *types.UID
	// Admin marks a device that is only observed.
	Admin bool
	// Config is nil where no configuration applies.
	Config api.Config
	// Limits are those of a share.
	Limits Limits

	// withdrawn says that the policy does not offer the device any more.
	withdrawn bool
	// session is the MPS session that the device is in, or nil. Steps can have
	// the same.
	session *sessionPlan
	// interval is the time slice that has to be set, or empty.
	interval sharing.Interval
}

// address is where the partition of a step is. The device must be a partition.
func (s Step) address() partition.Address {
	return partition.Address{
		PCIAddress: s.Device.GPU.PCIAddress,
		ProfileID:  s.Device.Partition.Profile.ID,
		Placement:  s.Device.Partition.Placement,
	}
}

// dynamic tells whether MIG mode follows the claims.
func (s Step) dynamic() bool { return s.Device.GPU.MIG != nil && s.Device.GPU.MIG.Dynamic }

// Node is what a claim is planned for.
type Node struct {
	// Driver and Pool are those of the allocation results that count. Results of
	// other drivers are ignored.
	Driver, Pool string
	// Inventory holds the devices that this node publishes.
	Inventory *device.Inventory
}

// NewPlan works out what to do for a claim. It depends on nothing but its
// arguments. Errors are about the claim (not allocated, a configuration that is
// invalid, not supported or for another kind of device) or about a device that
// the node does not have.
//
// A claim without devices of this driver gives a plan without steps.
func NewPlan(claim *resourceapi.ResourceClaim, node Node) (*Plan, error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated")
	}
	plan := &Plan{Claim: Ref{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}}
	allocation := claim.Status.Allocation.Devices
	configs, err := decodeConfigs(allocation.Config, node.Driver)
	if err != nil {
		return nil, err
	}
	for _, result := range allocation.Results {
		if result.Driver != node.Driver {
			continue
		}
		step, err := newStep(result, node)
		if err != nil {
			return nil, err
		}
		if step.Config, err = configs.choose(result, step.Device); err != nil {
			return nil, err
		}
		plan.add(step)
	}
	if err := configs.checkUse(); err != nil {
		return nil, err
	}
	slices.SortFunc(plan.Steps, compareSteps)
	if err := plan.shareOut(); err != nil {
		return nil, err
	}
	return plan, plan.checkOverlap()
}

func newStep(result resourceapi.DeviceRequestAllocationResult, node Node) (Step, error) {
	if result.Pool != node.Pool {
		return Step{}, fmt.Errorf("device %s is allocated from pool %q, this node's is %q", result.Device, result.Pool, node.Pool)
	}
	d, found := node.Inventory.Lookup(result.Device)
	if !found {
		return Step{}, fmt.Errorf("device %s does not exist on this node: its GPU is missing or does not answer, "+
			"or it was published under another name before", result.Device)
	}
	step := Step{
		Requests: []string{result.Request},
		Pool:     result.Pool,
		Device:   d,
		ShareID:  result.ShareID,
		Admin:    ptr.Deref(result.AdminAccess, false),
	}
	if d.Share != nil {
		step.Limits = limitsOf(result, d.Share)
		step.withdrawn = slices.Contains(node.Inventory.Withdrawn(), d.Name)
	}
	return step, nil
}

// add takes one device only once: an admin request may name a device that
// another request of the claim has as well.
func (p *Plan) add(step Step) {
	for i := range p.Steps {
		same := &p.Steps[i]
		if same.Device.Name == step.Device.Name && ptr.Equal(same.ShareID, step.ShareID) {
			same.Requests = append(same.Requests, step.Requests...)
			same.Admin = same.Admin && step.Admin
			if same.Config == nil {
				same.Config = step.Config
			}
			return
		}
	}
	p.Steps = append(p.Steps, step)
}

// gpus lists the PCI addresses of the GPUs that have to be locked, in order. Who
// only observes a whole GPU asks the hardware nothing.
func (p *Plan) gpus() []string {
	var addresses []string
	for _, s := range p.Steps {
		if !s.Admin || s.Device.Partition != nil {
			addresses = append(addresses, s.Device.GPU.PCIAddress)
		}
	}
	return inOrder(addresses)
}

// inOrder sorts PCI addresses and takes each once. A longer PCI domain is a
// higher number.
func inOrder(addresses []string) []string {
	slices.SortFunc(addresses, comparePCI)
	return slices.Compact(addresses)
}

func comparePCI(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

func compareSteps(a, b Step) int {
	return cmp.Or(
		comparePCI(a.Device.GPU.PCIAddress, b.Device.GPU.PCIAddress),
		cmp.Compare(start(a.Device), start(b.Device)),
		cmp.Compare(a.turn(), b.turn()),
		cmp.Compare(a.Device.Name, b.Device.Name),
		cmp.Compare(ptr.Deref(a.ShareID, ""), ptr.Deref(b.ShareID, "")),
	)
}

// turn puts who only looks at a partition after who makes it.
func (s Step) turn() int {
	if s.Admin {
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
func (p *Plan) checkOverlap() error {
	devices := p.record("").Devices
	for i := range devices {
		for j := range i {
			if devices[i].overlaps(&devices[j]) {
				return fmt.Errorf("the claim is allocated %s and %s, which overlap", devices[j].Device, devices[i].Device)
			}
		}
	}
	return nil
}

// record is what the journal says before anything is done.
func (p *Plan) record(bootID string) *Record {
	r := &Record{APIVersion: recordVersion, Kind: recordKind, Claim: p.Claim, State: Preparing, BootID: bootID}
	for _, s := range p.Steps {
		d := DeviceRecord{
			Requests:   s.Requests,
			Pool:       s.Pool,
			Device:     s.Device.Name,
			ShareID:    s.ShareID,
			Admin:      s.Admin,
			Type:       s.Device.Kind,
			PCIAddress: s.Device.GPU.PCIAddress,
			DynamicMIG: s.dynamic(),
		}
		if s.Device.Static != nil {
			d.Type = static
		}
		if shape := s.Device.Partition; shape != nil {
			d.Partition = &PartitionRecord{Profile: shape.Profile.Name, ProfileID: shape.Profile.ID, Placement: shape.Placement}
		}
		d.Sharing = s.record()
		if d.Sharing != nil || s.Device.Share != nil {
			r.APIVersion = sharingVersion
		}
		r.join(s)
		r.Devices = append(r.Devices, d)
	}
	return r
}
