// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// MIGState returns the GPU's instances, ordered by placement. It includes instances
// without compute instance, which a walk over MIG devices does not find.
//
// The error wraps gpu.ErrNotSupported on a GPU without MIG, and gpu.ErrLost or
// gpu.ErrResetRequired on any GPU that needs an administrator. It is cheap enough to
// be called every few seconds: 2 calls of the library while MIG mode is off, 9 on an
// empty H100, 37 on one with seven partitions.
func (c *Client) MIGState(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	state, err := onGPU(ctx, &c.session, pciAddress, func(r *reading) gpu.MIGState {
		// The functions for MIG do not promise to report that the GPU has fallen off the bus or waits for a
		// reset; this one asks the GPU. Any other error will be that of the next call too.
		_ = must(r, "nvmlDeviceGetMemoryInfo", r.dev.GetMemoryInfo)
		if !errors.Is(r.err, gpu.ErrLost) && !errors.Is(r.err, gpu.ErrResetRequired) {
			r.err = nil
		}
		mode := r.migMode()
		if !mode.current || r.err != nil {
			// There can be no instances, and listing them is refused.
			return gpu.MIGState{Enabled: mode.current, Pending: mode.pending}
		}
		return gpu.MIGState{Enabled: true, Pending: mode.pending, Instances: r.instances()}
	})
	if err != nil {
		return gpu.MIGState{}, err
	}
	c.ids.note(pciAddress, state.Instances, time.Now())
	return state, nil
}

// instances lists the instances of one profile after the other, since the library has
// no list of all. "Not supported" is no answer for a profile that is, nor for MIG mode that is on:
// an instance that is overlooked here is lost.
func (r *reading) instances() []gpu.Instance {
	profiles := readProfiles(r)
	if len(profiles) == 0 {
		r.fail("nvmlDeviceGetGpuInstanceProfileInfo", nil, "MIG mode is on, but no profile is supported")
	}
	var out []gpu.Instance
	for _, p := range profiles {
		found := must(r, "nvmlDeviceGetGpuInstances", func() ([]nvml.GpuInstance, nvml.Return) { return r.dev.GetGpuInstances(&p.info) })
		for _, gi := range found {
			if instance := r.instance(gi, p); !r.gone() {
				out = append(out, instance)
			}
		}
	}
	if failed := new(gpu.Error); errors.Is(r.err, gpu.ErrNotSupported) && errors.As(r.err, &failed) {
		r.err = &gpu.Error{Call: failed.Call, PCIAddress: failed.PCIAddress, Text: failed.Text}
	}
	slices.SortFunc(out, func(a, b gpu.Instance) int {
		return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// gone reports whether the last call has failed because somebody else has destroyed what was listed, which is
// no failure.
func (r *reading) gone() bool {
	gone := errors.Is(r.err, gpu.ErrNotFound)
	if gone {
		r.err = nil
	}
	return gone
}

// instance reads a GPU instance. Its compute instances are listed by profile, until all slices are accounted for.
func (r *reading) instance(gi nvml.GpuInstance, p *instanceProfile) gpu.Instance {
	info := must(r, "nvmlGpuInstanceGetInfo", gi.GetInfo)
	instance := gpu.Instance{
		ID:        int(info.Id),
		ProfileID: info.ProfileId,
		Placement: gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)},
	}
	free := int(p.info.SliceCount)
	for _, compute := range readComputeProfiles(r, gi, p) {
		if free <= 0 {
			break
		}
		found := must(r, "nvmlGpuInstanceGetComputeInstances", func() ([]nvml.ComputeInstance, nvml.Return) {
			return gi.GetComputeInstances(&compute)
		})
		for _, ci := range found {
			if one := readComputeInstance(r, ci); !r.gone() {
				instance.Compute = append(instance.Compute, one)
				free -= int(compute.SliceCount)
			}
		}
	}
	slices.SortFunc(instance.Compute, func(a, b gpu.ComputeInstance) int { return cmp.Compare(a.ID, b.ID) })
	return instance
}

// readComputeInstance reads a compute instance. Its UUID comes from the MIG device handle
// in its description: a walk over all MIG devices takes up to ten seconds under
// load.
func readComputeInstance(r *reading, ci nvml.ComputeInstance) gpu.ComputeInstance {
	info := must(r, "nvmlComputeInstanceGetInfo_v2", ci.GetInfo)
	uuid := must(r, "nvmlDeviceGetUUID", func() (string, nvml.Return) { return info.Device.GetUUID() })
	if r.err == nil && !strings.HasPrefix(uuid, "MIG-") {
		r.err = fmt.Errorf("UUID of compute instance %d on GPU %s is %q: not a MIG device's", info.Id, r.pci, uuid)
	}
	return gpu.ComputeInstance{ID: int(info.Id), UUID: uuid, Slices: int(info.Placement.Size)}
}

// SetMIGMode sets MIG mode, unless it is set already, and reads it back: the driver
// has been seen to return success and to do nothing.
//
// The error wraps gpu.ErrInUse while a process holds the GPU, and
// gpu.ErrResetRequired if the change needs a GPU reset; then it stays pending. Minor
// numbers may change. It takes about 4 s if the GPU must be initialised again.
func (c *Client) SetMIGMode(ctx context.Context, pciAddress string, enabled bool) error {
	const call = "nvmlDeviceSetMigMode"
	target := nvml.DEVICE_MIG_DISABLE
	if enabled {
		target = nvml.DEVICE_MIG_ENABLE
	}
	activation, err := onGPU(ctx, &c.session, pciAddress, func(r *reading) nvml.Return {
		if mode := r.migMode(); mode == (migMode{enabled, enabled}) || r.err != nil {
			return nvml.SUCCESS
		}
		defer r.lib.forget(r.handle) // the change may reset the GPU
		return must(r, call, func() (activation, ret nvml.Return) { return r.dev.SetMigMode(target) })
	})
	if err != nil {
		return err
	}
	mode, err := onGPU(ctx, &c.session, pciAddress, (*reading).migMode)
	switch {
	case err != nil:
		return fmt.Errorf("MIG mode was set, reading it back failed: %w", err)
	case mode.current == enabled:
		return nil
	case activation != nvml.SUCCESS:
		return failure(call+" (activation)", pciAddress, activation)
	case mode.pending == enabled:
		return &gpu.Error{Call: call, PCIAddress: pciAddress, Text: "the change is pending until the GPU is reset", Err: gpu.ErrResetRequired}
	}
	is := map[bool]string{true: "on", false: "off"}[mode.current]
	return &gpu.Error{Call: call, PCIAddress: pciAddress, Text: "answered success, but the mode is still " + is}
}

// idOwners are those who have the instance ids of each GPU, as far as readings of the instances show
// it. The driver uses ids again. An instance of ours is read before it is destroyed, so
// that nothing but an instance of somebody else, made and gone between two readings, is missed.
type idOwners struct {
	mu   sync.Mutex
	gpus map[string]map[int]idOwner
}

// idOwner is who has an id, by the UUIDs of its compute instances, and empty if nobody; and from
// when on no other was seen to have it.
type idOwner struct {
	uuids string
	since time.Time
}

// firstReading is an id that no instance has. Its owner is since the first reading: nothing is known of the time before.
const firstReading = -1

// note takes what a reading has shown that ended at a time, and completes it with IDSince.
func (ids *idOwners) note(pci string, instances []gpu.Instance, over time.Time) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	owners := ids.gpus[pci]
	if owners == nil {
		owners = map[int]idOwner{firstReading: {since: over}}
		ids.gpus[pci] = owners
	}
	now := map[int]string{}
	for _, i := range instances {
		if _, seen := owners[i.ID]; !seen {
			owners[i.ID] = owners[firstReading]
		}
		for _, c := range i.Compute {
			now[i.ID] += c.UUID + " "
		}
	}
	for id, o := range owners {
		if o.uuids != "" && o.uuids != now[id] {
			o.since = over
		}
		owners[id] = idOwner{now[id], o.since}
	}
	for i := range instances {
		if id := instances[i].ID; now[id] != "" { // no program can be on one without compute instances
			instances[i].IDSince = owners[id].since
		}
	}
}
