// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// compare is what the instances of a GPU mean in the light of the journal.
func (j *journalView) compare(pciAddress string, state gpu.MIGState) finding {
	var f finding
	claims := j.of(pciAddress)
	instances := slices.SortedFunc(slices.Values(state.Instances), compareInstances)
	for _, i := range instances {
		j.judge(&f, pciAddress, i, claims)
	}
	for _, d := range claims {
		there := slices.ContainsFunc(instances, func(i gpu.Instance) bool { return d.isAt(i) })
		if uuid := d.Partition.uuid(); uuid != "" && !hasUUID(instances, uuid) {
			f.gone = append(f.gone, uuid)
		}
		switch {
		case d.Type == static && d.Partition.Live != nil && !hasUUID(instances, d.Partition.Live.UUID):
			f.statics = append(f.statics, d.static(d.Partition.Live.UUID, true))
		case d.Type == static || !j.abandoned[d.record.Claim.UID]:
		case d.Partition == nil || there:
			f.conditions = append(f.conditions, d.pending("and this is not done yet"))
		}
	}
	return f
}

// judge says what a single instance means.
func (j *journalView) judge(f *finding, pciAddress string, i gpu.Instance, claims []owned) {
	if slices.ContainsFunc(claims, func(d owned) bool { return d.made() && d.isAt(i) && d.mayBe(i) }) {
		return
	}
	taken := slices.ContainsFunc(claims, func(d owned) bool { return d.Type == static && d.isAt(i) })
	usable := len(i.Compute) == 1 && i.Compute[0].UUID != ""
	if usable && (taken || len(j.unreadable) == 0) {
		f.statics = append(f.statics, device.Static{
			PCIAddress: pciAddress, ProfileID: i.ProfileID, Placement: i.Placement, UUID: i.Compute[0].UUID,
		})
		return
	}
	f.conditions = append(f.conditions, device.Condition{
		PCIAddress: pciAddress, Where: &i.Placement, ProfileID: &i.ProfileID, Reason: device.Occupied,
		Message: fmt.Sprintf("GPU instance %d (profile %d, placement %d:%d) of GPU %s has no record and is left alone: %s",
			i.ID, i.ProfileID, i.Placement.Start, i.Placement.Size, pciAddress, j.explain(i)),
	})
}

// explain says why an instance without record is not a device, and what helps.
func (j *journalView) explain(i gpu.Instance) string {
	switch {
	case len(j.unreadable) > 0:
		return fmt.Sprintf("it may be that of a claim whose journal file cannot be read (%s). "+
			"Once no pod uses it, remove it with nvidia-smi mig -dci and -dgi, then remove the file", j.unreadable[0])
	case len(i.Compute) == 0:
		return "somebody else, or a driver that was killed, made it and it has no compute instance. " +
			"Remove it with nvidia-smi mig -dgi, or give it a compute instance with nvidia-smi mig -cci"
	case len(i.Compute) > 1:
		return fmt.Sprintf("it is divided into %d compute instances, which cannot be allocated", len(i.Compute))
	}
	return "its MIG device does not tell its UUID"
}

// trouble is what is the case on a GPU that does not answer as it should: the
// partitions of others are taken to be what they were.
func (j *journalView) trouble(pciAddress string, latest finding, err error) finding {
	f := finding{statics: latest.statics}
	condition := device.Condition{PCIAddress: pciAddress, Message: fmt.Sprintf("GPU %s: %v", pciAddress, err)}
	switch {
	case errors.Is(err, gpu.ErrNotSupported), errors.Is(err, gpu.ErrDriverNotLoaded):
	case errors.Is(err, gpu.ErrHung):
		condition.Reason = device.Unresponsive
	case errors.Is(err, gpu.ErrLost), errors.Is(err, gpu.ErrNotFound):
		condition.Reason = device.Lost
	case errors.Is(err, gpu.ErrResetRequired):
		condition.Reason = device.ResetRequired
	default:
		condition.Reason = device.Unresponsive
	}
	if condition.Reason != "" {
		f.conditions = append(f.conditions, condition)
	}
	for _, d := range j.of(pciAddress) {
		if j.abandoned[d.record.Claim.UID] && d.Type != static {
			f.conditions = append(f.conditions, d.pending("and this waits until the GPU answers"))
		}
	}
	return f
}

// pending keeps a place from being allocated until what a claim had there is gone.
func (d owned) pending(why string) device.Condition {
	c := device.Condition{
		PCIAddress: d.PCIAddress, Reason: device.ReleasePending,
		Message: fmt.Sprintf("device %s of claim %s is to be released, %s", d.Device, d.record.Claim, why),
	}
	if p := d.Partition; p != nil {
		c.Where, c.ProfileID = &p.Placement, &p.ProfileID
	}
	return c
}

func hasUUID(instances []gpu.Instance, uuid string) bool {
	return slices.ContainsFunc(instances, func(i gpu.Instance) bool { return len(i.Compute) == 1 && i.Compute[0].UUID == uuid })
}

func compareInstances(a, b gpu.Instance) int {
	return cmp.Or(
		cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.Placement.Size, b.Placement.Size),
		cmp.Compare(a.ProfileID, b.ProfileID), cmp.Compare(a.ID, b.ID))
}
