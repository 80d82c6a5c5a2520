// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/panics"
)

const (
	// patience is how long Reconcile waits for GPUs that are slow, or busy, or for an MPS supervisor that does not answer.
	patience = time.Second
	// gpuTime bounds what is done for one GPU at a time. One whose calls take more than a second each needs minutes for
	// what others do at once.
	gpuTime = 10 * time.Minute
	// silenceLimit is how long the MPS supervisor may not answer before people are told. At the start of a node it may begin
	// later than this process.
	silenceLimit = 5 * time.Second
)

// orphaned takes the place of a GPU's address for the status of claims that are kept although they do not exist any more.
const orphaned = ""

// gpuStatus is what the last reconciliation of a GPU has found, in terms of package device.
type gpuStatus struct {
	statics    []device.Static
	conditions []device.Condition
	// claims are statements about claims that have something of it.
	claims []Statement
	// observed says that this process has observed the GPU, or knows that it does not answer.
	observed bool
	// left is why something is not as it should be, or nil.
	left error
}

// Reconcile brings the records, the CDI specs and the hardware into agreement: at the start, when something has changed, and
// every now and then it does what the rules say is due on each GPU. It returns which partitions others have made, and which
// devices must not be allocated now. GPUs are independent: one that a call is at work on, or that is slow, is not waited for, and
// what was known of it last still counts. The API server is not asked, see [Manager.ReleaseOrphans].
//
// A GPU whose driver is not loaded has nothing to say, which readiness does. An error says what is left, in the same words every
// time, and that Reconcile should be called again.
func (m *Manager) Reconcile(ctx context.Context) (device.Status, error) {
	status, err := m.converge(ctx, func(*rules.Task) bool { return true })
	return status, errors.Join(err, m.store.Sweep(m.clock()))
}

// converge works on all GPUs at the same time, unless it is at work on them still. What takes longer than a moment goes on
// without the caller.
func (m *Manager) converge(ctx context.Context, isDue func(*rules.Task) bool) (status device.Status, err error) {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	snapshot := m.store.Snapshot()
	gpus := knownGPUs(m.GPUs(), snapshot)
	results := make([]<-chan singleflight.Result, len(gpus))
	for i, address := range gpus {
		results[i] = m.atWork.DoChan(address, func() (any, error) {
			m.statuses.Store(address, m.convergeGPU(ctx, address, isDue))
			return nil, nil //nolint:nilnil // it is stored
		})
	}
	var left []error
	for i, address := range gpus {
		select {
		case <-results[i]:
		case <-limited.Done():
		}
		left = append(left, m.status(address).left)
	}
	snapshot = m.store.Snapshot() // much of it may be released by now
	m.statuses.Store(orphaned, m.orphans.kept(snapshot))
	for _, address := range append(m.GPUs(), orphaned) {
		s := m.status(address)
		status.Static = append(status.Static, s.statics...)
		// The rules say so, too, but where an observation has not ended yet, or has found nothing.
		status.Conditions = with(append(status.Conditions, s.conditions...), releasing(m.store, snapshot, address, m.clock()))
	}
	return status, errors.Join(left...)
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

// status is the last status of a GPU. Before it was observed, the status follows from the records.
func (m *Manager) status(address string) (s gpuStatus) {
	last, _ := m.statuses.Load(address)
	if s, _ = last.(gpuStatus); s.observed {
		return s
	}
	s.statics = nil
	for _, d := range m.store.Snapshot().On(address) {
		if d.Type == record.Static && !d.Admin && d.Partition.Made != nil {
			s.statics = append(s.statics, device.Static{
				PCIAddress: address, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement, UUID: d.Partition.Made.UUID,
			})
		}
	}
	return s
}

// releasing are the devices on a GPU that are to be released, as records say, and that the call which releases them has left. The rest of
// one that claims share may be given out.
func releasing(store *record.Store, snapshot *record.Snapshot, address string, now time.Duration) (all []device.Condition) {
	held := snapshot.On(address)
	for _, d := range held {
		isShared := slices.ContainsFunc(held, func(other record.Held) bool {
			return other.Record.State == record.Prepared && other.Mark == record.Started && other.SameDevice(d.Device)
		})
		isLeft := d.Record.State == record.Releasing && !store.Released(d.Record.Claim.UID, now-releaseTime)
		if isLeft && d.Mark == record.Started && !d.Admin && d.Type != record.Static && !isShared {
			all = append(all, pending(d.Device, fmt.Sprintf("device %s of claim %s is to be released, and its GPU is slow or busy",
				d.Device.Device, d.Record.Claim)))
		}
	}
	return all
}

// pending says why a device of an ended claim must not be given out yet.
func pending(d *record.Device, text string) device.Condition {
	c := device.Condition{PCIAddress: d.PCIAddress, Reason: device.ReleasePending, Message: text}
	if d.Partition != nil {
		c.Where, c.ProfileID = &d.Partition.Placement, &d.Partition.ProfileID
	}
	return c
}

// convergeGPU does what is due on a GPU, and returns its status then.
func (m *Manager) convergeGPU(ctx context.Context, address string, isDue func(*rules.Task) bool) (s gpuStatus) {
	s = m.status(address)
	defer panics.Recover(ctx, &s.left)
	limited, cancel := context.WithTimeout(ctx, gpuTime)
	defer cancel()
	decision, err := m.engine.Converge(limited, address, isDue)
	switch {
	case ctx.Err() != nil:
		return s // it was not the GPU that gave up
	case decision == nil && errors.Is(err, lock.ErrElsewhere):
		// A process that hangs in the kernel does not die and keeps its locks.
		s.observed, s.conditions = true, unanswered(address, fmt.Errorf("%w; an earlier instance of the driver may hang in it: %w", err, gpu.ErrHung))
	case decision == nil && err == nil:
		return s // a call is at work on it, and what was left may be left still
	case decision == nil, gpu.IsPending(decision.Unanswered) && !errors.Is(decision.Unanswered, gpu.ErrHung):
		// It is busy or slow, or waits behind another GPU.
	default:
		s = m.translate(address, decision, s)
	}
	s.left = errors.Join(err, unfinished(decision))
	return s
}

// unfinished says what is not as it should be with the claims on a GPU.
func unfinished(decision *converge.Decision) error {
	if decision == nil {
		return nil
	}
	var errs []error
	for _, s := range decision.Statements {
		if s.Reason == rules.ReleasePending || s.Reason == rules.PartitionGone {
			errs = append(errs, errors.New(s.Text))
		}
	}
	if at := slices.IndexFunc(decision.Verdicts, func(v rules.Verdict) bool { return errors.Is(v.Cause, sharing.ErrNoSupervisor) }); at >= 0 {
		errs = append(errs, errors.New(decision.Verdicts[at].Why))
	}
	if decision.Unanswered != nil && len(decision.Verdicts) > 0 {
		errs = append(errs, fmt.Errorf("its claims are not checked: %w", decision.Unanswered))
	}
	return errors.Join(errs...)
}

// conditions are what statements are for devices, besides their place. The others are about claims.
var conditions = map[rules.Reason]device.Condition{
	rules.Occupied:         {Reason: device.Occupied},
	rules.ReleasePending:   {Reason: device.ReleasePending},
	rules.RefusedInUse:     {Reason: device.ReleasePending},
	rules.UsedByOthers:     {Reason: device.ReleasePending, Undivided: true},
	rules.OpenedByOthers:   {Reason: device.Opened, Undivided: true, Effect: policy.EffectNone},
	rules.RecordUnreadable: {Reason: device.ReleasePending, Undivided: true}, // partitions are seen on the hardware
	rules.SessionUnwell:    {Reason: device.MPSUnhealthy},
	rules.Unsupervised:     {Reason: device.MPSUnavailable, Kind: device.MPS},
}

// translate turns a decision into what is published and said about the GPU.
func (m *Manager) translate(address string, decision *converge.Decision, last gpuStatus) (s gpuStatus) {
	s.statics, s.observed = decision.Static, true
	for _, one := range decision.Statements {
		if reason := eventReasons[one.Reason]; reason != "" {
			s.claims = append(s.claims, Statement{Claim: one.Claim, Reason: reason, Device: one.Device, Text: one.Text})
		}
		switch one.Reason {
		case rules.Unresponsive:
			s.conditions = append(s.conditions, unanswered(address, decision.Unanswered)...)
		case rules.Unsupervised:
			// Taints of MPS shares by an earlier process stay until the supervisor has had the time to answer.
			s.observed = last.observed || !hasMPS(m.devices(), address) || m.engine.SilentFor() >= silenceLimit
		}
		if c, holds := m.condition(address, one, decision.Failed[one.Claim.UID]); holds {
			s.conditions = append(s.conditions, c)
		}
	}
	if decision.Unanswered != nil {
		s.statics, s.claims, s.conditions = last.statics, last.claims, with(s.conditions, last.conditions)
	}
	return s
}

// with adds the conditions that all does not have yet. A GPU that does not answer is kept back anyhow, and needs no others.
func with(all, more []device.Condition) []device.Condition {
	out := []device.Reason{device.Unresponsive, device.Lost, device.ResetRequired}
	for _, one := range more {
		is := func(c device.Condition) bool {
			same := c.Reason == one.Reason && ptr.Equal(c.Where, one.Where) && c.Kind == one.Kind && c.Undivided == one.Undivided
			return c.PCIAddress == one.PCIAddress && (same || slices.Contains(out, c.Reason))
		}
		if !slices.ContainsFunc(all, is) {
			all = append(all, one)
		}
	}
	return all
}

// condition turns a statement about a GPU into a condition, and reports whether that holds now. Failed is what has just failed for the
// claim that the statement is about.
func (m *Manager) condition(address string, one rules.Statement, failed error) (c device.Condition, holds bool) {
	c, holds = conditions[one.Reason]
	c.PCIAddress, c.Message = address, one.Text
	if one.Place != record.Undivided {
		c.Where, c.ProfileID, c.Undivided = &one.Place.Placement, &one.Place.ProfileID, false
	}
	switch one.Reason {
	case rules.Unsupervised:
		holds = m.engine.SilentFor() >= silenceLimit && hasMPS(m.devices(), address)
	case rules.SessionUnwell:
		c.ProfileID = nil // a claim has the engines of the place
	case rules.RefusedInUse:
		c.Where, c.ProfileID, c.Kind = nil, nil, device.Partition // nothing of its kind can be made
		if one.Place == record.Undivided {
			c.Kind = device.MPS
		}
	case rules.ReleasePending:
		if failed != nil {
			c.Message += ": " + strings.ReplaceAll(failed.Error(), "\n", "; ")
		}
		if d, found := m.devices().Lookup(one.Device); c.Where == nil && found && d.Partition != nil {
			c.Where = &d.Partition.Placement // that of a session which is named after a partition
		}
	}
	return c, holds
}

// hasMPS reports whether a GPU is published in shares by MPS.
func hasMPS(inventory *device.Inventory, address string) bool {
	return slices.ContainsFunc(inventory.Devices(), func(d device.Device) bool {
		return d.Kind == device.MPS && d.GPU.PCIAddress == address
	})
}

// unanswered says what is known of a GPU that does not answer as it should.
func unanswered(address string, err error) []device.Condition {
	c := device.Condition{PCIAddress: address, Reason: device.Unresponsive, Message: err.Error()}
	switch {
	case errors.Is(err, gpu.ErrNotSupported), errors.Is(err, gpu.ErrDriverNotLoaded):
		return nil // readiness says so
	case errors.Is(err, gpu.ErrHung):
	case errors.Is(err, gpu.ErrLost), errors.Is(err, gpu.ErrNotFound):
		c.Reason = device.Lost
	case errors.Is(err, gpu.ErrResetRequired):
		c.Reason = device.ResetRequired
	}
	return []device.Condition{c}
}
