// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package survey

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// classify says what the instances of a GPU mean in the light of the journal.
func (v *view) classify(pciAddress string, facts *gpu.GPU, state gpu.MIGState) findings {
	var f findings
	claims := v.on(pciAddress)
	instances := slices.SortedFunc(slices.Values(state.Instances), compareInstances)
	for _, i := range instances {
		if !explained(i, claims) {
			v.classifyUnexplained(&f, pciAddress, i, claims, isWhole(facts, i))
		}
	}
	for _, d := range v.snapshot.On(pciAddress) {
		if uuid := d.Partition.LiveUUID(); uuid != "" && !gpu.HasMIGDevice(instances, uuid) {
			f.gone = append(f.gone, owned{d.Record.Claim.UID, uuid})
		}
	}
	for _, d := range claims {
		there := slices.ContainsFunc(instances, d.At)
		switch {
		case d.Type == journal.Static && d.Partition.Live != nil && !gpu.HasMIGDevice(instances, d.Partition.Live.UUID):
			f.statics = append(f.statics, static(d, true))
		case d.Type == journal.Static || !v.abandoned[d.Record.Claim.UID]:
		case d.Partition == nil || there:
			f.conditions = append(f.conditions, pending(d, "and this is not done yet"+v.because(d)))
		}
	}
	return f
}

// explained reports whether an instance was made for one of the claims.
func explained(i gpu.Instance, claims []journal.Held) bool {
	return slices.ContainsFunc(claims, func(d journal.Held) bool { return d.Owned() && d.At(i) && d.MayBe(i) })
}

// classifyUnexplained says what an instance means that no claim has made.
func (v *view) classifyUnexplained(f *findings, pciAddress string, i gpu.Instance, claims []journal.Held, whole bool) {
	taken := slices.ContainsFunc(claims, func(d journal.Held) bool { return d.Type == journal.Static && d.At(i) })
	usable := whole && len(i.Compute) == 1 && i.Compute[0].UUID != ""
	if usable && (taken || v.snapshot.MayPartition(pciAddress) == "") {
		f.statics = append(f.statics, device.Static{
			PCIAddress: pciAddress, ProfileID: i.ProfileID, Placement: i.Placement, UUID: i.Compute[0].UUID,
		})
		return
	}
	f.conditions = append(f.conditions, device.Condition{
		PCIAddress: pciAddress, Where: &i.Placement, ProfileID: &i.ProfileID, Reason: device.Occupied,
		Message: fmt.Sprintf("GPU instance %d (profile %d, placement %d:%d) of GPU %s has no record and is left alone: %s",
			i.ID, i.ProfileID, i.Placement.Start, i.Placement.Size, pciAddress, v.advice(pciAddress, i, whole)),
	})
}

// advice says why an instance without record is not a device, and what helps.
func (v *view) advice(pciAddress string, i gpu.Instance, whole bool) string {
	path := v.snapshot.MayPartition(pciAddress)
	switch {
	case path != "":
		return fmt.Sprintf("it may be that of a claim whose journal file cannot be read (%s). "+
			"Once no pod uses it, remove it with nvidia-smi mig -dci and -dgi, then remove the file", path)
	case len(i.Compute) == 0:
		return "somebody else, or a driver that was killed, made it and it has no compute instance. " +
			"Remove it with nvidia-smi mig -dgi, or give it a compute instance with nvidia-smi mig -cci"
	case len(i.Compute) > 1:
		return fmt.Sprintf("it is divided into %d compute instances, which cannot be allocated", len(i.Compute))
	}
	if !whole {
		return fmt.Sprintf("its compute instance has only %d of its slices, which cannot be allocated as a partition. "+
			"Remove both with nvidia-smi mig -dci and -dgi, or give it the whole instance", i.Compute[0].Slices)
	}
	return "its MIG device has no UUID"
}

// isWhole reports whether the only compute instance of an instance spans it. Where the
// hardware does not say it is taken to.
func isWhole(facts *gpu.GPU, i gpu.Instance) bool {
	if facts == nil || facts.MIG == nil || len(i.Compute) != 1 || i.Compute[0].Slices == 0 {
		return true
	}
	at := slices.IndexFunc(facts.MIG.Profiles, func(p gpu.Profile) bool { return p.ID == i.ProfileID })
	return at < 0 || i.Compute[0].Slices >= facts.MIG.Profiles[at].Slices
}

// degraded says what is known of a GPU that does not answer as it should: the
// partitions of others are taken to be what they were, and so are those that are gone.
func (v *view) degraded(pciAddress string, latest findings, err error) findings {
	f := findings{statics: latest.statics, gone: latest.gone}
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
	for _, d := range v.on(pciAddress) {
		if v.abandoned[d.Record.Claim.UID] && d.Type != journal.Static {
			f.conditions = append(f.conditions, pending(d, "and this waits until the GPU answers"))
		}
	}
	return f
}

// because is the reason for which the release of a claim has failed, for messages.
func (v *view) because(d journal.Held) string {
	if v.reason == nil {
		return ""
	}
	if err := v.reason(d.Record.Claim.UID); err != nil {
		return ": " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return ""
}

// pending keeps a place from being allocated until what a claim had there is gone.
func pending(d journal.Held, why string) device.Condition {
	c := device.Condition{
		PCIAddress: d.PCIAddress, Reason: device.ReleasePending,
		Message: fmt.Sprintf("device %s of claim %s is to be released, %s", d.Device.Device, d.Record.Claim, why),
	}
	if p := d.Partition; p != nil {
		c.Where, c.ProfileID = &p.Placement, &p.ProfileID
	}
	return c
}

func compareInstances(a, b gpu.Instance) int {
	return cmp.Or(
		cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.Placement.Size, b.Placement.Size),
		cmp.Compare(a.ProfileID, b.ProfileID), cmp.Compare(a.ID, b.ID))
}
