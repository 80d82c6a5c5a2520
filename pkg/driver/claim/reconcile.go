// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/panics"
)

const (
	// patience is how long a call of Reconcile waits for all GPUs. What takes longer goes on without it.
	patience = 5 * time.Second
	// roundTime bounds what is done for one GPU at a time. One whose calls take more than a second each needs minutes for
	// what others do at once.
	roundTime = 10 * time.Minute
)

// Reconcile brings the records, the CDI specs and the hardware into agreement, at the start, when the driver has appeared,
// and every now and then: what the rules say is due on each GPU. GPUs are independent: one that a call is at work on is left
// to that call, and one that is slow is not waited for. The API server is not asked, see [Manager.ReleaseOrphans].
//
// An error says what is left, in the same words every time, and that Reconcile should be called again.
func (m *Manager) Reconcile(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	snapshot := m.store.Snapshot()
	errs := sideBySide(limited, &m.reconciling, knownGPUs(m.GPUs(), snapshot), func(address string) error {
		return m.convergeGPU(ctx, address)
	})
	if snapshot.Err == nil {
		m.engine.Failures.Retain(snapshot)
	}
	return errors.Join(append(errs, m.store.Sweep(m.clock()))...)
}

// knownGPUs are those of the inventory, and those that records are about.
func knownGPUs(gpus []string, snapshot *record.Snapshot) []string {
	for _, r := range snapshot.All() {
		gpus = append(gpus, r.GPUs()...)
	}
	for i := range snapshot.Guards {
		gpus = append(gpus, snapshot.Guards[i].GPUs...)
	}
	return slices.Compact(gpu.SortPCIAddresses(gpus))
}

// convergeGPU does what is due on a GPU. The error says what is left.
func (m *Manager) convergeGPU(ctx context.Context, address string) (err error) {
	defer panics.Recover(ctx, &err)
	ctx, cancel := context.WithTimeout(ctx, roundTime)
	defer cancel()
	said, err := m.engine.Converge(ctx, address)
	if said == nil {
		return err
	}
	return errors.Join(err, unfinished(said))
}

// unfinished is what of the claims on a GPU is not as it should be.
func unfinished(said *converge.Said) error {
	var errs []error
	for _, s := range said.Statements {
		switch s.Reason {
		case rules.ReleasePending, rules.PartitionGone:
			errs = append(errs, errors.New(s.Text))
		}
	}
	if at := slices.IndexFunc(said.Verdicts, func(v rules.Verdict) bool { return errors.Is(v.Cause, sharing.ErrNoSupervisor) }); at >= 0 {
		errs = append(errs, errors.New(said.Verdicts[at].Why))
	}
	if said.Unanswered != nil && len(said.Verdicts) > 0 {
		errs = append(errs, fmt.Errorf("its claims are not checked: %w", said.Unanswered))
	}
	return errors.Join(errs...)
}
