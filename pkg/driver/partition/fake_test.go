// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// fakeGPU behaves like one MIG-capable GPU: placements exclude each other,
// media engines too, instances with compute instances or processes are in use,
// ids are not sequential, UUIDs are never used twice.
type fakeGPU struct {
	notMIG    bool
	enabled   bool
	pending   bool
	resetMode bool // a mode change waits for a reset
	media     uint32
	instances []gpu.Instance
	processes []gpu.Process
	// fabric is how far its registration is while MIG mode is off.
	fabric    string
	fabricErr error

	faults map[string][]fault
	calls  []string // what was asked to change, in order
	made   int
}

// fault makes one call fail, before or after it took effect. With a nil error
// the call reports success and does nothing.
type fault struct {
	err   error
	after bool
	// then runs when the fault has happened.
	then func(*fakeGPU)
}

const pci = "0000:1b:00.0"

func (f *fakeGPU) change(ctx context.Context, name, call string, do func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	f.calls = append(f.calls, call)
	pending := f.faults[name]
	if len(pending) == 0 {
		return do()
	}
	next := pending[0]
	f.faults[name] = pending[1:]
	if next.after {
		if err := do(); err != nil {
			return err
		}
	}
	if next.then != nil {
		next.then(f)
	}
	return next.err
}

func (f *fakeGPU) MIGState(ctx context.Context, _ string) (gpu.MIGState, error) {
	if err := ctx.Err(); err != nil {
		return gpu.MIGState{}, err
	}
	if f.notMIG {
		return gpu.MIGState{}, gpu.ErrNotSupported
	}
	if pending := f.faults["MIGState"]; len(pending) > 0 {
		f.faults["MIGState"] = pending[1:]
		if pending[0].err != nil {
			return gpu.MIGState{}, pending[0].err
		}
	}
	state := gpu.MIGState{Enabled: f.enabled, Pending: f.pending}
	for _, i := range f.instances {
		i.Compute = slices.Clone(i.Compute)
		state.Instances = append(state.Instances, i)
	}
	return state, nil
}

// Describe names all processes that are listed.
func (f *fakeGPU) Describe(_ context.Context, _ string, instanceID int, listed []gpu.Process) string {
	var names []string
	for _, p := range listed {
		if p.InstanceID == instanceID || instanceID < 0 {
			names = append(names, fmt.Sprintf("process %d", p.PID))
		}
	}
	slices.Sort(names)
	return cmp.Or(strings.Join(names, ", "), "nobody")
}

func (f *fakeGPU) Processes(ctx context.Context, _ string) ([]gpu.Process, error) {
	return f.processes, ctx.Err()
}

func (f *fakeGPU) FabricPending(context.Context, string) (string, error) {
	if f.enabled {
		return "Not Started", nil
	}
	return f.fabric, f.fabricErr
}

func (f *fakeGPU) SetMIGMode(ctx context.Context, _ string, enabled bool) error {
	return f.change(ctx, "SetMIGMode", fmt.Sprintf("mode %t", enabled), func() error {
		if f.pending = enabled; f.resetMode && f.enabled != enabled {
			return gpu.ErrResetRequired
		}
		if f.enabled != enabled && len(f.instances) > 0 {
			return gpu.ErrInUse
		}
		f.enabled = enabled
		return nil
	})
}

func (f *fakeGPU) CreateInstance(ctx context.Context, _ string, profile uint32, at gpu.Placement) (int, error) {
	id := 7 + f.made*3
	err := f.change(ctx, "CreateInstance", fmt.Sprintf("gi+ %d@%d:%d", profile, at.Start, at.Size), func() error {
		if !f.enabled {
			return gpu.ErrNotSupported
		}
		for _, i := range f.instances {
			if i.Placement.Overlaps(at) || (i.ProfileID == f.media && profile == f.media) {
				return gpu.ErrNoRoom
			}
		}
		if len(f.instances) == 0 && len(f.processes) > 0 {
			return gpu.ErrInUse // as from Hopper on, where the mode changes under whoever has memory
		}
		f.made++
		f.instances = append(f.instances, gpu.Instance{ID: id, ProfileID: profile, Placement: at})
		return nil
	})
	return id, err
}

func (f *fakeGPU) DestroyInstance(ctx context.Context, _ string, id int) error {
	return f.change(ctx, "DestroyInstance", fmt.Sprintf("gi- %d", id), func() error {
		i := f.index(id)
		if i < 0 {
			return gpu.ErrNotFound
		}
		if len(f.instances[i].Compute) > 0 || f.busy(id) {
			return gpu.ErrInUse
		}
		f.instances = slices.Delete(f.instances, i, i+1)
		return nil
	})
}

func (f *fakeGPU) CreateComputeInstance(ctx context.Context, _ string, id int) (gpu.ComputeInstance, error) {
	var made gpu.ComputeInstance
	err := f.change(ctx, "CreateComputeInstance", fmt.Sprintf("ci+ %d", id), func() error {
		i := f.index(id)
		if i < 0 {
			return gpu.ErrNotFound
		}
		if len(f.instances[i].Compute) > 0 {
			return gpu.ErrNoRoom
		}
		f.made++
		at := f.instances[i].Placement
		made = gpu.ComputeInstance{ID: 0, UUID: fmt.Sprintf("MIG-%d-%d", at.Start, at.Size)}
		f.instances[i].Compute = []gpu.ComputeInstance{made}
		return nil
	})
	return made, err
}

func (f *fakeGPU) DestroyComputeInstance(ctx context.Context, _ string, id, ci int) error {
	return f.change(ctx, "DestroyComputeInstance", fmt.Sprintf("ci- %d/%d", id, ci), func() error {
		i := f.index(id)
		if i < 0 {
			return gpu.ErrNotFound
		}
		c := slices.IndexFunc(f.instances[i].Compute, func(c gpu.ComputeInstance) bool { return c.ID == ci })
		if c < 0 {
			return gpu.ErrNotFound
		}
		if f.busy(id) {
			return gpu.ErrInUse
		}
		f.instances[i].Compute = slices.Delete(f.instances[i].Compute, c, c+1)
		return nil
	})
}

func (f *fakeGPU) index(id int) int {
	return slices.IndexFunc(f.instances, func(i gpu.Instance) bool { return i.ID == id })
}

func (f *fakeGPU) busy(id int) bool {
	return slices.ContainsFunc(f.processes, func(p gpu.Process) bool { return p.InstanceID == id })
}
