// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// watched tells the locks about calls that do not return, wherever they are made
// from and whatever becomes of the error.
type watched struct {
	gpus  Partitions
	locks *locks
}

func (w watched) State(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	state, err := w.gpus.State(ctx, pciAddress)
	return state, w.watch(pciAddress, err)
}

func (w watched) Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	processes, err := w.gpus.Processes(ctx, pciAddress)
	return processes, w.watch(pciAddress, err)
}

func (w watched) Create(ctx context.Context, at partition.Address, dynamic bool) (partition.Live, error) {
	live, err := w.gpus.Create(ctx, at, dynamic)
	return live, w.watch(at.PCIAddress, err)
}

func (w watched) Destroy(ctx context.Context, at partition.Address, uuid string, dynamic bool) error {
	return w.watch(at.PCIAddress, w.gpus.Destroy(ctx, at, uuid, dynamic))
}

func (w watched) EnsureWhole(ctx context.Context, pciAddress string, dynamic bool) error {
	return w.watch(pciAddress, w.gpus.EnsureWhole(ctx, pciAddress, dynamic))
}

// watchedSharing is watched for what makes devices shared.
type watchedSharing struct {
	sharing Sharing
	locks   *locks
}

func (w watchedSharing) Start(ctx context.Context, s sharing.Session, adopt bool) (sharing.Live, error) {
	live, err := w.sharing.Start(ctx, s, adopt)
	return live, w.watch(err)
}

func (w watchedSharing) Stop(ctx context.Context, s sharing.Session) error {
	return w.watch(w.sharing.Stop(ctx, s))
}

func (w watchedSharing) SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error {
	return w.watch(w.sharing.SetInterval(ctx, d, interval))
}

func (w watchedSharing) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	return w.sharing.Sessions(ctx)
}

// watch looks for all calls that are out: a session may be on several GPUs.
func (w watchedSharing) watch(err error) error {
	for _, call := range hungCalls(err) {
		w.locks.stuck(call.PCIAddress, call)
	}
	return err
}

func hungCalls(err error) []*gpu.HungError {
	switch e := err.(type) { //nolint:errorlint // this walks through the wrapped ones
	case nil:
		return nil
	case *gpu.HungError:
		return []*gpu.HungError{e}
	case interface{ Unwrap() error }:
		return hungCalls(e.Unwrap())
	case interface{ Unwrap() []error }:
		var calls []*gpu.HungError
		for _, wrapped := range e.Unwrap() {
			calls = append(calls, hungCalls(wrapped)...)
		}
		return calls
	}
	return nil
}

// watch looks for the first call that is out. Those that were not made because of
// another one name that one.
func (w watched) watch(pciAddress string, err error) error {
	var call *gpu.HungError
	if errors.As(err, &call) {
		w.locks.stuck(pciAddress, call)
	}
	return err
}
