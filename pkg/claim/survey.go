// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// surveys are the latest findings by PCI address.
type surveys struct {
	mu     sync.Mutex
	latest map[string]finding
	// since is when it was first seen that another process has a GPU's lock.
	since map[string]time.Duration
	// silentSince is when the MPS supervisor did not answer first, nil when it does.
	silentSince *time.Duration
}

// elsewhereLimit is longer than any call keeps a GPU, undoing included.
const elsewhereLimit = 2 * time.Minute

// elsewhere notes whether another process has a GPU's lock, and tells for how long
// that has been so.
func (s *surveys) elsewhere(pciAddress string, held bool, now time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !held {
		delete(s.since, pciAddress)
		return 0
	}
	if s.since == nil {
		s.since = map[string]time.Duration{}
	}
	if _, known := s.since[pciAddress]; !known {
		s.since[pciAddress] = now
	}
	return now - s.since[pciAddress]
}

// finding is what a survey says about one GPU.
type finding struct {
	statics    []device.Static
	conditions []device.Condition
	// gone are the UUIDs of partitions that claims had and that do not exist any
	// more. No other partition ever gets the same.
	gone []string
}

func (s *surveys) get(pciAddress string) (finding, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found, known := s.latest[pciAddress]
	return found, known
}

func (s *surveys) put(pciAddress string, f finding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest == nil {
		s.latest = map[string]finding{}
	}
	s.latest[pciAddress] = f
}

// isGone tells whether a partition that a claim has was found to be missing.
func (s *surveys) isGone(d *DeviceRecord) bool {
	found, _ := s.get(d.PCIAddress)
	return slices.Contains(found.gone, d.Partition.uuid())
}

// Survey compares the journal with the hardware of all GPUs in the inventory and
// tells which partitions others have made, and which devices must not be allocated
// now. It changes nothing. A GPU that a call is at work on is not waited for: what
// the previous survey said of it still counts.
//
// A GPU whose driver is not loaded has nothing to tell, which readiness does.
func (m *Manager) Survey(ctx context.Context) device.Status {
	var status device.Status
	inventory := m.inventory.Load()
	if inventory == nil {
		return status
	}
	var addresses []string
	for _, d := range inventory.Devices() {
		addresses = append(addresses, d.GPU.PCIAddress)
	}
	addresses = inOrder(addresses)

	// The record of a session is there before the session, so the sessions come first.
	// What the journal says of a GPU stays true while its lock is held, so the locks do
	// as well.
	var seen observed
	seen.sessions, seen.err = m.sessions(ctx)
	gpus := make([]*surveyed, len(addresses))
	for i, address := range addresses {
		gpus[i] = &surveyed{manager: m, address: address}
		gpus[i].release, gpus[i].lockErr = m.locks.tryGPU(address)
	}
	journal, err := m.readJournal()
	var wg sync.WaitGroup
	for _, g := range gpus {
		wg.Go(func() { g.survey(ctx, journal, err) })
	}
	wg.Wait()
	for _, g := range gpus {
		status.Static = append(status.Static, g.finding.statics...)
		status.Conditions = append(status.Conditions, g.finding.conditions...)
	}
	status.Conditions = append(status.Conditions, m.surveySessions(inventory, seen, journal)...)
	return status
}

var errElsewhere = fmt.Errorf("another process has had its lock for more than %s; an earlier instance of the driver may hang in it: %w",
	elsewhereLimit, gpu.ErrHung)

// surveyed is one GPU in one survey.
type surveyed struct {
	manager *Manager
	address string
	// release is nil where the lock is not held: it is busy, or lockErr says why.
	release func()
	lockErr error
	finding finding
}

func (g *surveyed) survey(ctx context.Context, journal *journalView, journalErr error) {
	if g.release != nil {
		defer g.release()
	}
	m := g.manager
	if journalErr != nil {
		klog.FromContext(ctx).Error(journalErr, "GPU is not compared with the journal", "pciAddress", g.address)
		g.finding, _ = m.surveys.get(g.address)
		return
	}
	latest, known := m.surveys.get(g.address)
	if !known {
		latest.statics = journal.statics(g.address)
	}
	busy := g.release == nil && g.lockErr == nil
	held := m.surveys.elsewhere(g.address, busy && m.locks.elsewhere(g.address), m.clock())
	switch {
	case g.lockErr != nil:
		g.finding = journal.trouble(g.address, latest, g.lockErr)
	case held >= elsewhereLimit:
		// A process that hangs in the kernel does not die and keeps its locks.
		g.finding = journal.trouble(g.address, latest, errElsewhere)
		return
	case busy:
		g.finding = latest
		return
	default:
		state, err := m.partitions.State(ctx, g.address)
		if err != nil && ctx.Err() != nil {
			// It was not the GPU that gave up.
			g.finding = latest
			return
		}
		if err != nil {
			g.finding = journal.trouble(g.address, latest, err)
		} else {
			g.finding = journal.compare(g.address, state)
		}
	}
	m.surveys.put(g.address, g.finding)
}

// journalView is what the journal says at one moment.
type journalView struct {
	// records are those of this boot.
	records []*Record
	// abandoned are the claims that are not prepared and that no call is at
	// work on.
	abandoned map[types.UID]bool
	// unreadable are the files of claims of which nothing is known.
	unreadable []string
}

func (m *Manager) readJournal() (*journalView, error) {
	boot, err := m.roots.BootID()
	if err != nil {
		return nil, err
	}
	all, unreadable, err := m.journal.list()
	if err != nil {
		return nil, err
	}
	quarantined, err := m.journal.quarantine.files(boot)
	if err != nil {
		return nil, err
	}
	view := &journalView{abandoned: map[types.UID]bool{}, unreadable: append(quarantined, unreadable...)}
	for _, r := range all {
		if r.BootID != boot {
			continue
		}
		view.records = append(view.records, r)
		if r.State != Prepared {
			if view.abandoned[r.Claim.UID], err = m.isAbandoned(r.Claim.UID); err != nil {
				return nil, err
			}
		}
	}
	return view, nil
}

// isAbandoned tells whether a claim that was seen half done is so, and not just
// changing.
func (m *Manager) isAbandoned(uid types.UID) (bool, error) {
	release, err := m.locks.tryClaim(uid)
	if err != nil || release == nil {
		return false, err
	}
	defer release()
	r, err := m.journal.read(uid)
	return err == nil && r != nil && r.State != Prepared, err
}

// of lists the devices on a GPU that are not only observed, with their records.
func (j *journalView) of(pciAddress string) []owned {
	var found []owned
	for _, r := range j.records {
		for i := range r.Devices {
			if d := &r.Devices[i]; d.PCIAddress == pciAddress && !d.Admin {
				found = append(found, owned{r, d})
			}
		}
	}
	return found
}

// owned is a device that a claim has.
type owned struct {
	record *Record
	*DeviceRecord
}

// statics are the static devices that claims have, for the case that nothing else
// is known.
func (j *journalView) statics(pciAddress string) []device.Static {
	var statics []device.Static
	for _, d := range j.of(pciAddress) {
		if d.Type == static && d.Partition.Live != nil {
			statics = append(statics, d.static(d.Partition.Live.UUID, false))
		}
	}
	return statics
}

func (d *DeviceRecord) static(uuid string, gone bool) device.Static {
	return device.Static{
		PCIAddress: d.PCIAddress, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement, UUID: uuid, Gone: gone,
	}
}

func (d *DeviceRecord) isAt(i gpu.Instance) bool {
	return d.Partition != nil && d.Partition.ProfileID == i.ProfileID && d.Partition.Placement == i.Placement
}

// mayBe tells whether an instance in a claim's place is the claim's: one with
// another UUID was made by somebody else, after the GPU was reset.
func (d *DeviceRecord) mayBe(i gpu.Instance) bool {
	was := d.Partition.uuid()
	return was == "" || len(i.Compute) == 0 || len(i.Compute) == 1 && i.Compute[0].UUID == was
}
