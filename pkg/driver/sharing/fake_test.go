// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

const (
	firstPCI, secondPCI = "0000:1b:00.0", "0000:2c:00.0"
	migUUID             = "MIG-4f1c8c5e"
	id                  = "gpu-0000-1b-00-0"
)

var (
	first     = Device{PCIAddress: firstPCI, UUID: "GPU-first"}
	second    = Device{PCIAddress: secondPCI, UUID: "GPU-second"}
	partition = Device{PCIAddress: firstPCI, UUID: migUUID}
)

// node is a machine: its GPUs and the supervisor. After each call it looks whether
// a session runs on a device that lets others in.
type node struct {
	t        *testing.T
	modes    map[string]gpu.ComputeMode // by UUID of the devices that there are
	modeless []string                   // those of them that have no mode
	sessions map[string]mps.Status
	// phase and losses are those of sessions that Ensure makes.
	phase  mps.Phase
	losses int

	calls []string
	// strike lets calls fail. They are counted from 1.
	strike func(n int, call string) *fault
	// then runs at the end of a call.
	then func(call string)
	// open is set where a session may run on a device that lets others in.
	open bool
}

// fault is a call that fails, with its effect or without.
type fault struct {
	err    error
	effect bool
}

// newNode has the devices first and second, and a partition.
func newNode(t *testing.T) *node {
	return &node{
		t: t,
		modes: map[string]gpu.ComputeMode{
			first.UUID: gpu.ComputeDefault, second.UUID: gpu.ComputeDefault, migUUID: gpu.ComputeDefault,
		},
		sessions: map[string]mps.Status{}, phase: mps.Running,
	}
}

func (n *node) manager() *Manager { return New(Options{Modes: n, Supervisor: n}) }

// call makes one call, of which only do has an effect.
func (n *node) call(ctx context.Context, call string, do func() error) error {
	n.t.Helper()
	n.calls = append(n.calls, call)
	if err := ctx.Err(); err != nil {
		return err
	}
	var struck *fault
	if n.strike != nil {
		struck = n.strike(len(n.calls), call)
	}
	var err error
	if struck == nil || struck.effect {
		err = do()
	}
	if struck != nil {
		err = struck.err
	}
	if n.then != nil {
		n.then(call)
	}
	if !n.open {
		n.look(call)
	}
	return err
}

// look fails the test for a session beside which others may use a device.
func (n *node) look(call string) {
	n.t.Helper()
	for _, status := range n.sessions {
		for _, uuid := range status.Spec.Devices {
			if mode, ok := n.modes[uuid]; ok && uuid != migUUID && mode != gpu.ComputeExclusiveProcess && !slices.Contains(n.modeless, uuid) {
				n.t.Errorf("after %s: session %s runs on %s, whose mode is %s", call, status.Spec.ID, uuid, mode)
			}
		}
	}
}

func (n *node) device(uuid string) error {
	if _, ok := n.modes[uuid]; !ok {
		return &gpu.Error{Call: "fake", Text: "no such device", Err: gpu.ErrNotFound}
	}
	if slices.Contains(n.modeless, uuid) {
		return &gpu.Error{Call: "fake", Text: "Not Supported", Err: gpu.ErrNotSupported}
	}
	return nil
}

func (n *node) ComputeMode(ctx context.Context, _, uuid string) (mode gpu.ComputeMode, err error) {
	err = n.call(ctx, "read "+uuid, func() error {
		mode = n.modes[uuid]
		return n.device(uuid)
	})
	return mode, err
}

func (n *node) SetComputeMode(ctx context.Context, _, uuid string, mode gpu.ComputeMode) error {
	return n.call(ctx, fmt.Sprintf("%s to %s", uuid, mode), func() error {
		err := n.device(uuid)
		if err == nil {
			n.modes[uuid] = mode
		}
		return err
	})
}

func (n *node) Ensure(ctx context.Context, spec mps.Spec) (status mps.Status, err error) {
	err = n.call(ctx, "ensure "+spec.ID, func() error {
		status = mps.Status{
			Spec: spec, Phase: n.phase, History: mps.History{Losses: n.losses}, Message: "said by the fake",
			PipeDir: "/run/mps/" + spec.ID + "/pipe", ShmDir: "/run/mps/" + spec.ID + "/shm",
		}
		n.sessions[spec.ID] = status
		return nil
	})
	return status, err
}

func (n *node) Stop(ctx context.Context, id string) error {
	return n.call(ctx, "stop "+id, func() error {
		delete(n.sessions, id)
		return nil
	})
}

func (n *node) List(ctx context.Context) (list []mps.Status, err error) {
	err = n.call(ctx, "list", func() error {
		list = slices.Collect(maps.Values(n.sessions))
		return nil
	})
	return list, err
}

// start is what is done for a session.
func (n *node) start(id string, percentage int, devices ...Device) (mps.Status, error) {
	m := n.manager()
	for _, d := range devices {
		if d.isPartition() {
			continue
		}
		if err := m.SetExclusive(n.t.Context(), d, true); err != nil {
			return mps.Status{}, err
		}
	}
	return m.Ensure(n.t.Context(), session(id, percentage, devices...), devices)
}

func session(id string, percentage int, devices ...Device) mps.Spec {
	spec := mps.Spec{ID: id, ThreadPercentage: percentage, Memory: map[string]int64{}}
	for _, d := range devices {
		spec.Devices = append(spec.Devices, d.UUID)
		spec.Memory[d.UUID] = int64(percentage) << 30
	}
	return spec
}
