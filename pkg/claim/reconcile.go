// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/partage-dev/partage/pkg/claim/converge"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/panics"
)

const (
	// patience is how long a call of Reconcile waits for all GPUs. What takes longer goes on without it.
	patience = 5 * time.Second
	// roundTime bounds what is done for one GPU at a time. One whose calls take more than a second each needs minutes for
	// what others do at once.
	roundTime = 10 * time.Minute
	// orphanTime bounds the release of an orphan. What is left is tried again.
	orphanTime = 30 * time.Second
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
		_, err := m.converge(ctx, address)
		return err
	})
	if snapshot.Err == nil {
		m.engine.Failures.Retain(snapshot)
	}
	return errors.Join(append(errs, m.store.Sweep(m.clock()))...)
}

// sideBySide works on all GPUs at the same time, unless it is at work on them still, and returns what has come of that. What
// goes on when ctx ends does so without the caller.
func sideBySide(ctx context.Context, atWork *singleflight.Group, gpus []string, do func(address string) error) (errs []error) {
	results := make([]<-chan singleflight.Result, len(gpus))
	for i, address := range gpus {
		results[i] = atWork.DoChan(address, func() (any, error) { return nil, do(address) })
	}
	for i, address := range gpus {
		select {
		case r := <-results[i]:
			errs = append(errs, r.Err)
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("GPU %s: this takes long and goes on", address))
		}
	}
	return errs
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

// converge does what is due on a GPU. The error says what is left.
func (m *Manager) converge(ctx context.Context, address string) (_ converge.Said, err error) {
	defer panics.Recover(ctx, &err)
	ctx, cancel := context.WithTimeout(ctx, roundTime)
	defer cancel()
	said, err := m.engine.Converge(ctx, address)
	if said == nil {
		return converge.Said{}, err
	}
	return *said, errors.Join(err, left(said))
}

// left is what of the claims on a GPU is not as it should be.
func left(said *converge.Said) error {
	var errs []error
	for _, s := range said.Statements {
		switch s.Reason {
		case rules.ReleasePending, rules.PartitionGone, rules.OrphanInUse:
			errs = append(errs, errors.New(s.Text))
		}
	}
	if at := slices.IndexFunc(said.Verdicts, func(v rules.Verdict) bool { return v.Code == rules.NoSupervisor }); at >= 0 {
		errs = append(errs, errors.New(said.Verdicts[at].Why))
	}
	if said.Unanswered != nil && len(said.Verdicts) > 0 {
		errs = append(errs, fmt.Errorf("its claims are not checked: %w", said.Unanswered))
	}
	return errors.Join(errs...)
}
