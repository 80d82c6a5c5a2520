// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/cdi/edit"
	"github.com/partage-dev/partage/pkg/cdi/hook"
	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/policy"
)

// ClaimSteps are those that belong to a claim and to no GPU, in the order in which they
// are applied, after those of all groups.
func (k *Kit) ClaimSteps(r *journal.Record) []Step {
	return append(k.LimitSteps(r), Step{Name: "CDI spec", Effect: cdiSpec{k}})
}

// LimitSteps are the steps of a claim before its CDI spec.
func (k *Kit) LimitSteps(r *journal.Record) []Step {
	if !r.Limited() {
		return nil
	}
	return []Step{{Name: "soft limits", Keys: limitedKeys(r), Effect: softLimits{k}}}
}

func limitedKeys(r *journal.Record) []string {
	var keys []string
	for i := range r.Devices {
		if d := &r.Devices[i]; d.Limited() {
			keys = append(keys, d.Key())
		}
	}
	return keys
}

// cdiSpec is the file that says how containers get the devices. It names partitions by
// numbers that are used again, so that a claim whose partition is gone must not have one.
type cdiSpec struct{ *Kit }

func (cdiSpec) Check(*Scene) error { return nil }

func (e cdiSpec) Apply(ctx context.Context, s *Scene) error {
	r := s.Record
	devices, err := e.cdiDevices(r)
	if err != nil {
		return err
	}
	if s.Attempt == First {
		if err := checkRequests(r, devices); err != nil {
			return err
		}
	}
	ids, err := e.CDI.Write(ctx, r.Claim.UID, devices)
	if err != nil {
		return err
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		id, found := ids[d.Key()]
		if !found {
			return fmt.Errorf("the CDI spec does not name %s", d.Key())
		}
		d.CDIDevice = id
	}
	return nil
}

// checkRequests refuses a request whose devices no container can have together. A
// container gets all devices of a request, and the hook would refuse it when it starts.
func checkRequests(r *journal.Record, devices []cdi.Device) error {
	env := map[string][]string{}
	for i := range r.Devices {
		for _, request := range r.Devices[i].Requests {
			env[request] = append(env[request], devices[i].Env...)
		}
	}
	for _, request := range slices.Sorted(maps.Keys(env)) {
		if err := hook.CheckMarkers(env[request]); err != nil {
			return fmt.Errorf("request %s: %w", request, err)
		}
	}
	return nil
}

func (e cdiSpec) Undo(_ context.Context, s *Scene) error { return e.CDI.Remove(s.Record.Claim.UID) }

func (cdiSpec) Forget(*journal.Record) {}

// cdiDevices finds what every device of a record adds to containers, as it is now. All
// partitions must be live.
func (k *Kit) cdiDevices(r *journal.Record) ([]cdi.Device, error) {
	var devices []cdi.Device
	for i := range r.Devices {
		d := &r.Devices[i]
		edits, err := k.edits(r, d)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Device, err)
		}
		device, err := edit.Device(d.Key(), edits...)
		if err != nil {
			return nil, err
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// edits chooses what a device adds to containers: a new mechanism adds its own here.
func (k *Kit) edits(r *journal.Record, d *journal.Device) ([]edit.Edit, error) {
	var edits []edit.Edit
	switch {
	case d.Partition == nil:
		edits = append(edits, edit.GPU{Roots: k.Roots, PCIAddress: d.PCIAddress})
		if d.Admin && d.Divisible {
			edits = append(edits, edit.Monitor{Roots: k.Roots})
		}
	case d.Partition.Live == nil:
		return nil, fmt.Errorf("the partition with %s is not live", d.Address())
	default:
		edits = append(edits, edit.Partition{
			Roots: k.Roots, PCIAddress: d.PCIAddress, InstanceID: d.Partition.Live.InstanceID, ComputeID: d.Partition.Live.ComputeID,
		})
	}
	switch {
	case d.Sharing != nil && d.Sharing.Session != "":
		edits = append(edits, k.mpsClient(r, d))
	case d.Limited():
		edits = append(edits, k.interposer(r, d))
	case !d.Admin:
		edits = append(edits, edit.Direct{Device: d.Key(), Owner: string(r.Claim.UID) + "/" + d.Key()})
	}
	return edits, nil
}

func (k *Kit) mpsClient(r *journal.Record, d *journal.Device) edit.MPSClient {
	s := r.Session(d.Sharing.Session)
	client := edit.MPSClient{
		Session: s.ID, PipeDir: s.PipeDir, ShmDir: s.ShmDir, Hook: k.Hook, Owner: string(r.Claim.UID) + "/" + s.ID,
	}
	if s.Shared {
		// The server's limits are those of the largest share.
		client.Owner = string(r.Claim.UID) + "/" + d.Key()
		client.ActiveThreadPercentage, client.PinnedMemoryBytes = d.Sharing.Limits.Percent, d.Sharing.Limits.MemoryBytes
		client.BelowNormal = d.Sharing.ClientPriority == policy.PriorityBelowNormal
	}
	return client
}

func (k *Kit) interposer(r *journal.Record, d *journal.Device) edit.Interposer {
	return edit.Interposer{
		Library: k.Limits.Library, Folder: k.Limits.Folder(r.Claim.UID), Device: d.Key(), Hook: k.Hook, Owner: limitsOwner(r, d),
		MemoryBytes: d.Sharing.Limits.MemoryBytes, SMPercent: d.Sharing.Limits.Percent,
	}
}

// limitsOwner is the same for the devices of a request, which containers get together,
// unless they are in the same place.
func limitsOwner(r *journal.Record, d *journal.Device) string {
	alone := !slices.ContainsFunc(r.Devices, func(other journal.Device) bool {
		return other.Key() != d.Key() && other.SamePlace(d)
	})
	if alone {
		return string(r.Claim.UID) + "/" + strings.Join(d.Requests, ",")
	}
	return string(r.Claim.UID) + "/" + d.Key()
}

// SpecMatches reports whether the CDI spec of a claim is there and up to date.
func (k *Kit) SpecMatches(ctx context.Context, r *journal.Record) (bool, error) {
	devices, err := k.cdiDevices(r)
	if err != nil {
		return false, err
	}
	return k.CDI.Matches(ctx, r.Claim.UID, devices)
}
