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

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/sharing"
)

// orphans are prepared claims that do not exist any more, or that are not allocated
// here. A pod that is deleted by force takes its claim with it before the kubelet has
// stopped its containers, so the kubelet gets time to release the claim itself.
type orphans struct {
	mu sync.Mutex
	// since is when this process first saw that a claim did not have its devices.
	since map[types.UID]orphan
}

// orphan is a claim as it was prepared at one time: it may be prepared anew.
type orphan struct{ prepared, since time.Duration }

// note remembers whether a claim is an orphan, and returns for how long it has been.
func (o *orphans) note(r *journal.Record, isOrphan bool, now time.Duration) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !isOrphan {
		delete(o.since, r.Claim.UID)
		return 0
	}
	if o.since == nil {
		o.since = map[types.UID]orphan{}
	}
	first, known := o.since[r.Claim.UID]
	if !known || first.prepared != r.Arrived {
		first = orphan{prepared: r.Arrived, since: now}
		o.since[r.Claim.UID] = first
	}
	return now - first.since
}

// retain forgets all other claims.
func (o *orphans) retain(uids []types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	keepOnly(o.since, uids)
}

// allocationState is what the API server's answer means for a prepared claim.
type allocationState int

const (
	// allocated is also a claim that is not prepared any more.
	allocated allocationState = iota
	// recentlyOrphaned is one that the kubelet may be about to release.
	recentlyOrphaned
	orphaned
)

// checkOrphan asks the API server about a prepared claim, and releases it if it has not
// had its devices for long enough. It returns when to ask again if that is known, as time
// from now.
func (c *reconciler) checkOrphan(ctx context.Context, uid types.UID) (again time.Duration, err error) {
	defer panics.Recover(ctx, &err)
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid))
	is, asked, age, err := c.stateInCluster(ctx, uid)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%w: %w", errUnknown, err)
	case is == recentlyOrphaned:
		return c.orphanGrace - age, nil
	case is == orphaned:
		if err := c.releaseUnchanged(ctx, asked); err != nil {
			return 0, fmt.Errorf("claim %s: %w", uid, err)
		}
	}
	return 0, nil
}

// stateInCluster asks the API server about a prepared claim. It is called without any
// lock, since that may take its time, and returns the record that the answer is about,
// and for how long the claim has been an orphan.
func (c *reconciler) stateInCluster(ctx context.Context, uid types.UID) (allocationState, *journal.Record, time.Duration, error) {
	r, err := c.store.Read(uid)
	if err != nil || r == nil || r.State != journal.Prepared {
		return allocated, nil, 0, nil //nolint:nilerr // Reconcile finds the same
	}
	claim, err := c.cluster.Claim(ctx, r.Claim)
	if err != nil {
		return allocated, nil, 0, err
	}
	hasDevices := claim != nil && c.isAllocated(claim, r)
	age := c.orphans.note(r, !hasDevices, c.clock())
	switch {
	case hasDevices:
		return allocated, r, 0, nil
	case claim == nil && r.BootID != c.store.Boot(), age >= c.orphanGrace:
		return orphaned, r, age, nil
	}
	return recentlyOrphaned, r, age, nil
}

// releaseUnchanged releases an orphan, unless it has been released, or prepared anew, since
// the API server was asked.
func (c *reconciler) releaseUnchanged(ctx context.Context, asked *journal.Record) error {
	unlock, err := c.locks.TryClaim(asked.Claim.UID)
	if err != nil {
		return err
	}
	if unlock == nil {
		return errors.New("it does not have its devices any more, and a call is at work on it")
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	r, err := c.load(ctx, asked.Claim.UID)
	if err != nil || r == nil || r.State != journal.Prepared || r.Arrived != asked.Arrived || r.BootID != asked.BootID {
		return err
	}
	return c.releaseOrphan(ctx, r)
}

// isAllocated reports whether the claim still has a device of the record: the kubelet may
// have lost its state and never release a claim that was deallocated meanwhile.
func (c *reconciler) isAllocated(claim *resourceapi.ResourceClaim, r *journal.Record) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return result.Driver == c.driver && result.Pool == c.pool && slices.ContainsFunc(r.Devices, func(d journal.Device) bool {
			return d.Device == result.Device && ptr.Equal(d.ShareID, result.ShareID)
		})
	})
}

// releaseOrphan releases a prepared claim that does not have its devices any more, unless
// processes use them. The caller holds the claim's lock.
func (c *reconciler) releaseOrphan(ctx context.Context, r *journal.Record) error {
	if r.BootID == c.store.Boot() {
		if err := c.disownOrphan(ctx, r); err != nil {
			return err
		}
	}
	klog.FromContext(ctx).Info("Releasing a claim that does not have its devices any more", "claim", r.Claim)
	err := c.release(ctx, r)
	if err == nil || errors.Is(err, errPending) {
		c.events.once(ctx, r.Claim, ReasonOrphanReleased, "", "The claim "+r.Claim.String()+
			" does not exist any more, or is not allocated here, so its devices were released without the kubelet.")
	}
	_, buryErr := c.store.Bury(r.Claim.UID, c.clock())
	return errors.Join(err, buryErr)
}

// disownOrphan writes down that a claim is being released, unless processes use its
// devices. Both is done under the locks of its GPUs: of the last two on a device each
// would otherwise take the other for the one that keeps it, also in another process.
func (c *reconciler) disownOrphan(ctx context.Context, r *journal.Record) error {
	var gpus []string
	for i := range r.Devices {
		if d := &r.Devices[i]; !d.Admin {
			gpus = append(gpus, d.PCIAddress)
		}
	}
	unlock, err := c.lockSoon(ctx, gpu.SortPCIAddresses(gpus))
	if err != nil {
		return err
	}
	defer unlock()
	pids, err := c.users(ctx, r)
	if err != nil {
		return fmt.Errorf("it does not have its devices any more and is kept, because their users are not known: %w", err)
	}
	if len(pids) > 0 {
		err := fmt.Errorf("it does not have its devices any more and is kept, because processes use them: %v", pids)
		c.events.once(ctx, r.Claim, ReasonOrphanInUse, "", "The claim "+r.Claim.String()+": "+err.Error())
		return err
	}
	r.State = journal.Unpreparing
	err = c.save(ctx, r)
	if journal.NoSpace(err) {
		// The release will remove the record under the same lock.
		r.State = journal.Prepared
		return nil
	}
	return err
}

// users lists the processes on the devices of a claim. Nothing but this keeps a
// whole GPU, or a partition that somebody else made, from being given away under a
// running container.
func (c *reconciler) users(ctx context.Context, r *journal.Record) ([]int, error) {
	snapshot, err := c.store.Snapshot()
	if err != nil {
		return nil, err
	}
	holders := snapshot.Others(r.Claim.UID).Holders()
	servers, err := c.servers(ctx, r)
	if err != nil {
		return nil, err
	}
	byGPU := map[string][]gpu.Process{}
	var pids []int
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Admin || d.SharedBy(holders) {
			// Whatever runs on a share that others have too goes on.
			continue
		}
		processes, known := byGPU[d.PCIAddress]
		if !known {
			if processes, err = c.processes(ctx, d.PCIAddress); err != nil {
				return nil, fmt.Errorf("device %s: %w", d.Device, err)
			}
			byGPU[d.PCIAddress] = processes
		}
		for _, p := range processes {
			if isOn(d, p) && !slices.Contains(servers, p.PID) {
				pids = append(pids, p.PID)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// servers lists the processes that hold a claim's devices on behalf of MPS clients. They
// are no users.
func (c *reconciler) servers(ctx context.Context, r *journal.Record) ([]int, error) {
	if len(r.Sessions) == 0 {
		return nil, nil
	}
	sessions, err := c.kit.Sessions(ctx)
	if errors.Is(err, sharing.ErrNoSupervisor) {
		// What still holds the device then counts as a user.
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, s := range r.Sessions {
		pids = append(pids, sessions[s.ID].Servers...)
	}
	return pids, nil
}

func (c *reconciler) processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	processes, err := c.partitions.Processes(ctx, pciAddress)
	if errors.Is(err, gpu.ErrNotSupported) {
		// The kernel knows who has the GPU open, whatever the driver can list.
		return c.openers(pciAddress)
	}
	return processes, err
}

// openers lists the processes that have the device node of a GPU open.
func (c *reconciler) openers(pciAddress string) ([]gpu.Process, error) {
	minor, err := c.roots.GPUMinor(pciAddress)
	if err != nil {
		return nil, err
	}
	pids, err := c.roots.Openers(fmt.Sprintf("/dev/nvidia%d", minor))
	if err != nil {
		return nil, err
	}
	var processes []gpu.Process
	for _, pid := range pids {
		processes = append(processes, gpu.Process{PID: pid, InstanceID: -1})
	}
	return processes, nil
}

func isOn(d *journal.Device, p gpu.Process) bool {
	return d.Partition == nil || p.InstanceID < 0 || (d.Partition.Live != nil && d.Partition.Live.InstanceID == p.InstanceID)
}
