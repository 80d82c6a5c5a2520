// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Cluster is what the API server says.
type Cluster interface {
	// Exists tells whether the claim exists with this UID. An error means that
	// it is not known now.
	Exists(ctx context.Context, claim Ref) (bool, error)
}

// orphans are prepared claims that do not exist any more. A pod that is deleted
// by force takes its claim with it before the kubelet has stopped its containers,
// so the kubelet gets time to release the claim itself.
type orphans struct {
	mu sync.Mutex
	// since is when this process first saw that a claim was gone.
	since map[types.UID]time.Duration
	// sharing is held while a claim with shares is released: of the last two on a
	// device each would otherwise take the other for the one that keeps it.
	sharing sync.Mutex
}

// see notes whether a claim is gone, and tells for how long it has been.
func (o *orphans) see(uid types.UID, gone bool, now time.Duration) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !gone {
		delete(o.since, uid)
		return 0
	}
	if o.since == nil {
		o.since = map[types.UID]time.Duration{}
	}
	since, known := o.since[uid]
	if !known {
		since = now
		o.since[uid] = now
	}
	return now - since
}

// keep forgets all other claims.
func (o *orphans) keep(uids []types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid := range o.since {
		if !slices.Contains(uids, uid) {
			delete(o.since, uid)
		}
	}
}

// fate is what the API server's answer means for a prepared claim.
type fate int

const (
	// wanted is also a claim of which nothing is known.
	wanted fate = iota
	// leaving is one that the kubelet may be about to release.
	leaving
	orphaned
)

// ask finds out about a prepared claim. It is called without any lock, since the
// API server may take its time; a claim that is gone stays gone.
func (m *Manager) ask(ctx context.Context, uid types.UID, boot string) (fate, error) {
	if m.cluster == nil {
		return wanted, nil
	}
	r, err := m.journal.read(uid)
	if err != nil || r == nil || r.State != Prepared {
		// Whoever loads it finds the same.
		return wanted, nil //nolint:nilerr // see above
	}
	exists, err := m.cluster.Exists(ctx, r.Claim)
	if err != nil {
		return wanted, err
	}
	gone := m.orphans.see(uid, !exists, m.clock())
	switch {
	case exists:
		return wanted, nil
	case r.BootID != boot || gone >= m.orphanGrace:
		return orphaned, nil
	}
	return leaving, nil
}

// releaseOrphan releases a prepared claim that does not exist any more, unless
// processes use it. The caller holds the claim's lock.
func (m *Manager) releaseOrphan(ctx context.Context, r *Record, boot string) error {
	logger := klog.FromContext(ctx)
	if slices.ContainsFunc(r.Devices, func(d DeviceRecord) bool { return d.isShare() }) {
		m.orphans.sharing.Lock()
		defer m.orphans.sharing.Unlock()
	}
	if r.BootID == boot {
		pids, err := m.users(ctx, r)
		if err != nil {
			return fmt.Errorf("it does not exist any more and is kept, because its users are not known: %w", err)
		}
		if len(pids) > 0 {
			err := fmt.Errorf("it does not exist any more and is kept, because processes use its devices: %v", pids)
			m.news.tell(ctx, r.Claim, ReasonOrphanInUse, "The claim "+r.Claim.String()+": "+err.Error())
			return err
		}
	}
	logger.Info("Releasing a claim that does not exist any more", "claim", r.Claim)
	err := m.unprepare(ctx, r, boot)
	if err == nil || errors.Is(err, errPending) {
		m.news.tell(ctx, r.Claim, ReasonOrphanReleased,
			"The claim "+r.Claim.String()+" does not exist any more, so its devices were released without the kubelet.")
	}
	return errors.Join(err, m.released.put(r.Claim.UID, boot, m.clock()))
}

// users are the processes on the devices of a claim. Nothing but this keeps a
// whole GPU, or a partition that somebody else made, from being given away under a
// running container.
func (m *Manager) users(ctx context.Context, r *Record) ([]int, error) {
	others, err := m.neighbours(r)
	if err != nil {
		return nil, err
	}
	holders := others.holders()
	servers, err := m.servers(ctx, r)
	if err != nil {
		return nil, err
	}
	byGPU := map[string][]gpu.Process{}
	var pids []int
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Admin || d.sharedBy(holders) {
			// Whatever runs on a share that others have too goes on.
			continue
		}
		processes, known := byGPU[d.PCIAddress]
		if !known {
			var err error
			if processes, err = m.processes(ctx, d.PCIAddress); err != nil {
				return nil, fmt.Errorf("device %s: %w", d.Device, err)
			}
			byGPU[d.PCIAddress] = processes
		}
		for _, p := range processes {
			if d.isUsedBy(p) && !slices.Contains(servers, p.PID) {
				pids = append(pids, p.PID)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

func (m *Manager) processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	release, err := m.locks.gpus(ctx, []string{pciAddress})
	if err != nil {
		return nil, err
	}
	defer release()
	processes, err := m.partitions.Processes(ctx, pciAddress)
	if errors.Is(err, gpu.ErrNotSupported) {
		// It never tells. A claim must not be kept for ever because of that.
		return nil, nil
	}
	return processes, err
}

func (d *DeviceRecord) isUsedBy(p gpu.Process) bool {
	return d.Partition == nil || (d.Partition.Live != nil && d.Partition.Live.InstanceID == p.InstanceID)
}
