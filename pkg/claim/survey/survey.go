// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package survey

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
)

const (
	// elsewhereLimit is longer than any call keeps a GPU, undoing included.
	elsewhereLimit = 2 * time.Minute
	// busyLimit is how long a GPU may be busy at every survey before one waits for it,
	// for busyWait at most.
	busyLimit = 30 * time.Second
	busyWait  = 5 * time.Second
	// silenceLimit is how long the MPS supervisor may not answer before people are told.
	// At the start of a node it may begin later than this process.
	silenceLimit = 5 * time.Second
)

// Surveyor makes surveys, and remembers what the last ones found.
type Surveyor struct {
	store *journal.Store
	locks *lock.Locks
	kit   *step.Kit
	// clock is the time since the machine started.
	clock   func() time.Duration
	pending func(types.UID) error

	mu sync.Mutex
	// latest are the findings by PCI address.
	latest map[string]findings
	// elsewhere, busy and silent are since when another process has had the lock of a GPU,
	// since when a GPU was not surveyed because it is busy, and since when the supervisor
	// has not answered (with an empty key).
	elsewhere, busy, silent stopwatches

	journalProblem logchange.Problem
}

// New makes a surveyor. The clock is the time since the machine started, and pending says
// why the release of a claim has failed, or nil.
func New(store *journal.Store, locks *lock.Locks, kit *step.Kit, clock func() time.Duration, pending func(types.UID) error) *Surveyor {
	return &Surveyor{
		store: store, locks: locks, kit: kit, clock: clock, pending: pending, latest: map[string]findings{},
		elsewhere: stopwatches{}, busy: stopwatches{}, silent: stopwatches{},
	}
}

// stopwatches are when something was first seen, by name.
type stopwatches map[string]time.Duration

func (w stopwatches) run(name string, on bool, now time.Duration) time.Duration {
	if !on {
		delete(w, name)
		return 0
	}
	if _, running := w[name]; !running {
		w[name] = now
	}
	return now - w[name]
}

func (s *Surveyor) time(w stopwatches, name string, on bool) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return w.run(name, on, s.clock())
}

// findings are what a survey says about one GPU.
type findings struct {
	statics    []device.Static
	conditions []device.Condition
	// gone are the partitions that claims had and that do not exist any more.
	gone []owned
}

// owned is a partition of a claim. Its UUID alone does not tell it from the next claim's: a partition made again in
// the same place has the same UUID.
type owned struct {
	claim types.UID
	uuid  string
}

func (s *Surveyor) last(pciAddress string) (findings, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found, known := s.latest[pciAddress]
	return found, known
}

// IsGone reports whether the partition of a claim was found to be missing.
func (s *Surveyor) IsGone(claim types.UID, d *journal.Device) bool {
	found, _ := s.last(d.PCIAddress)
	return slices.Contains(found.gone, owned{claim, d.Partition.LiveUUID()})
}

// Survey looks at all GPUs in the inventory. A GPU that a call is at work on is not
// waited for, unless it has been busy for long: what the previous survey said of it still
// counts.
func (s *Surveyor) Survey(ctx context.Context, inventory *device.Inventory) device.Status {
	facts := map[string]*gpu.GPU{}
	for _, d := range inventory.Devices() {
		facts[d.GPU.PCIAddress] = d.GPU
	}
	addresses := gpu.SortPCIAddresses(slices.Collect(maps.Keys(facts)))

	// The record of a session is there before the session, so the sessions come first.
	// What the journal says of a GPU stays true while its lock is held, so the locks do
	// as well.
	sessions, sessionsErr := s.kit.Sessions(ctx)
	gpus := make([]*surveyed, len(addresses))
	var wg sync.WaitGroup
	for i, address := range addresses {
		gpus[i] = &surveyed{Surveyor: s, address: address, gpu: facts[address]}
		wg.Go(func() { gpus[i].lock(ctx) })
	}
	wg.Wait()
	view, err := s.readJournal()
	s.journalProblem.Log(ctx, err, "GPUs are not compared with the journal", "GPUs are compared with the journal again")
	for _, g := range gpus {
		wg.Go(func() { g.surveySafely(ctx, view, err) })
	}
	wg.Wait()
	var status device.Status
	for _, g := range gpus {
		status.Static = append(status.Static, g.findings.statics...)
		status.Conditions = append(status.Conditions, g.findings.conditions...)
	}
	status.Conditions = append(status.Conditions, s.sessionConditions(inventory, sessions, sessionsErr, view)...)
	return status
}

var errElsewhere = fmt.Errorf("another process has had its lock for more than %s; an earlier instance of the driver may hang in it: %w",
	elsewhereLimit, gpu.ErrHung)

// surveyed is one GPU in one survey.
type surveyed struct {
	*Surveyor
	address string
	gpu     *gpu.GPU
	// unlock is nil where the lock is not held: it is busy, or lockErr says why.
	unlock   func()
	lockErr  error
	findings findings
}

// lock waits only for a GPU that has been busy for long.
func (g *surveyed) lock(ctx context.Context) {
	g.unlock, g.lockErr = g.locks.TryGPU(g.address)
	busy := g.unlock == nil && g.lockErr == nil
	if g.time(g.busy, g.address, busy) < busyLimit || g.locks.GPUElsewhere(g.address) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, busyWait)
	defer cancel()
	if unlock, err := g.locks.GPUs(limited, []string{g.address}); err == nil {
		g.unlock = unlock
	}
}

// surveySafely lets a panic be the failure of this GPU's survey only.
func (g *surveyed) surveySafely(ctx context.Context, view *view, viewErr error) {
	if g.unlock != nil {
		defer g.unlock()
	}
	var panicked error
	func() {
		defer panics.Recover(ctx, &panicked)
		g.survey(ctx, view, viewErr)
	}()
	if panicked != nil {
		g.findings, _ = g.last(g.address)
	}
}

func (g *surveyed) survey(ctx context.Context, view *view, viewErr error) {
	latest, known := g.last(g.address)
	if viewErr != nil {
		g.findings = latest
		return
	}
	if !known {
		latest.statics = view.statics(g.address)
	}
	busy := g.unlock == nil && g.lockErr == nil
	elsewhere := g.time(g.elsewhere, g.address, busy && g.locks.GPUElsewhere(g.address))
	switch {
	case g.lockErr != nil:
		g.findings = view.degraded(g.address, latest, g.lockErr)
	case elsewhere >= elsewhereLimit:
		// A process that hangs in the kernel does not die and keeps its locks.
		g.findings = view.degraded(g.address, latest, errElsewhere)
		return
	case busy:
		g.findings = latest
		return
	default:
		g.time(g.busy, g.address, false)
		state, err := g.kit.Partitions.State(ctx, g.address)
		if err != nil && ctx.Err() != nil {
			// It was not the GPU that gave up.
			g.findings = latest
			return
		}
		if err != nil {
			g.findings = view.degraded(g.address, latest, err)
		} else {
			g.findings = view.classify(g.address, g.gpu, state)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.latest[g.address] = g.findings
}

// Unexplained reports whether an instance that no record explains may be that of a claim
// whose damaged record is in the quarantine.
func (s *Surveyor) Unexplained(ctx context.Context, inventory *device.Inventory, uid types.UID) (bool, error) {
	snapshot, err := s.store.Snapshot()
	if err != nil {
		return true, err
	}
	view := &view{snapshot: snapshot}
	seen := map[string]bool{}
	for _, d := range inventory.Devices() {
		address := d.GPU.PCIAddress
		if seen[address] || d.GPU.MIG == nil || !snapshot.OfClaimMayPartition(uid, address) {
			continue
		}
		seen[address] = true
		state, err := s.kit.Partitions.State(ctx, address)
		if err != nil {
			return true, err
		}
		claims := view.on(address)
		if slices.ContainsFunc(state.Instances, func(i gpu.Instance) bool { return !explained(i, claims) }) {
			return true, nil
		}
	}
	return false, nil
}

// view is what the journal says at one moment.
type view struct {
	snapshot *journal.Snapshot
	// abandoned are the claims that are not prepared and that no call is at
	// work on.
	abandoned map[types.UID]bool
	// reason is why the release of a claim has failed, or nil.
	reason func(types.UID) error
}

func (s *Surveyor) readJournal() (*view, error) {
	snapshot, err := s.store.Snapshot()
	if err != nil {
		return nil, err
	}
	v := &view{snapshot: snapshot, abandoned: map[types.UID]bool{}, reason: s.pending}
	for _, r := range snapshot.Records {
		if r.State == journal.Prepared {
			continue
		}
		if v.abandoned[r.Claim.UID], err = s.isAbandoned(r.Claim.UID); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// isAbandoned reports whether a claim that was seen half done is so, and not just
// changing.
func (s *Surveyor) isAbandoned(uid types.UID) (bool, error) {
	unlock, err := s.locks.TryClaim(uid)
	if err != nil || unlock == nil {
		return false, err
	}
	defer unlock()
	r, err := s.store.Read(uid)
	return err == nil && r != nil && r.State != journal.Prepared, err
}

// on lists the devices on a GPU that are not only observed.
func (v *view) on(pciAddress string) []journal.Held {
	return slices.DeleteFunc(v.snapshot.On(pciAddress), func(d journal.Held) bool { return d.Admin })
}

// statics are the static devices that claims have, for the case that nothing else
// is known.
func (v *view) statics(pciAddress string) []device.Static {
	var statics []device.Static
	for _, d := range v.on(pciAddress) {
		if d.Type == journal.Static && d.Partition.Live != nil {
			statics = append(statics, static(d, false))
		}
	}
	return statics
}

func static(d journal.Held, gone bool) device.Static {
	return device.Static{
		PCIAddress: d.PCIAddress, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement,
		UUID: d.Partition.LiveUUID(), Gone: gone,
	}
}
