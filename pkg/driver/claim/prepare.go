// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/plan"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/node/host"
)

// Prepare makes all devices of a claim ready for containers, or none: when a step fails, what was done is undone before the
// call returns, and what cannot be undone is written down for Reconcile. Repeating the call gives the same answer.
//
// It waits for up to 15 seconds for a place that another claim, or a process, still holds, and tries again five times, within
// 8 seconds or so, what fails for a reason that may pass, both within ctx. A call that is older than the claim's release is
// refused, see [Arrived].
//
// Errors name the device. They wrap *RefusedError where the claim cannot be prepared as it is, and *api.InvalidError for a
// bad configuration, a *rules.Verdict and what that wraps where something is in the way, and the reasons of package
// gpu when the hardware refuses.
func (m *Manager) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]LiveDevice, error) {
	arrived := arrival(ctx, m.clock)
	wanted, err := m.plan(claim)
	if err != nil || len(wanted.Devices) == 0 {
		return nil, err
	}
	wanted.Arrived = arrived
	unlock, err := m.locks.Claim(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	was, _ := m.store.Read(claim.UID) // one that cannot be read is guarded
	if m.store.Released(claim.UID, arrived) || m.clock()-arrived > record.CallLife {
		return nil, record.ErrOutOfDate
	}
	if was != nil && was.BootID != m.store.Boot() && was.State == record.Prepared {
		keepShares(wanted, was)
	}
	r, err := m.engine.Prepare(ctx, &converge.Call{Wanted: wanted, Was: was})
	if err != nil {
		return nil, err
	}
	return m.live(r), nil
}

// Unprepare releases everything that a claim has, and answers within 20 seconds. It needs the records only: no inventory, no allocation.
// A claim without a record is a success, and so is one of which something is left to Reconcile. From then on a Prepare that
// arrived before this call is refused, see [Arrived].
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	return release(ctx, m.engine, uid, arrival(ctx, m.clock))
}

// keepShares: a claim that had its shares before the machine was started anew gets them again, whatever the policy says by now.
func keepShares(wanted, was *record.Record) {
	for i := range wanted.Devices {
		if d := &wanted.Devices[i]; was.Device(d.Key()) != nil {
			d.Clients = 0
		}
	}
}

// RefusedError is why a claim cannot be prepared as it is, for example because of an invalid configuration. Nothing was
// touched, so that nothing can be left.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }

func (e *RefusedError) Unwrap() error { return e.Err }

func (m *Manager) plan(claim *resourceapi.ResourceClaim) (*record.Record, error) {
	if err := record.CheckUID(claim.UID); err != nil {
		return nil, err
	}
	inventory := m.inventory.Load()
	if inventory == nil {
		return nil, errNoInventory
	}
	wanted, err := plan.New(claim, plan.Node{Driver: m.driver, Pool: m.pool, BootID: m.store.Boot(), Inventory: inventory})
	if err != nil {
		return nil, &RefusedError{err}
	}
	return wanted, nil
}

type arrivalKey struct{}

// Arrived stamps the time at which a call arrived. A Prepare that arrived before the claim was released is refused, however
// long it waited since. Without a stamp, Prepare and Unprepare take the time at which they are called.
func Arrived(ctx context.Context) context.Context { return arrivedAt(ctx, host.SinceBoot()) }

func arrivedAt(ctx context.Context, at time.Duration) context.Context {
	return context.WithValue(ctx, arrivalKey{}, at)
}

// arrival returns when the call arrived, on the clock of host.SinceBoot.
func arrival(ctx context.Context, now func() time.Duration) time.Duration {
	if at, stamped := ctx.Value(arrivalKey{}).(time.Duration); stamped {
		return at
	}
	return now()
}
