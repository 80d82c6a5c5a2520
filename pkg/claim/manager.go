// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
)

// undoTime bounds what is undone after a failure. It is granted on top of the
// caller's deadline, which may be why the call failed.
const undoTime = 30 * time.Second

// Partitions are the GPUs. The effects are idempotent, and the caller holds the
// GPU's lock. With dynamic false, MIG mode is never touched.
type Partitions interface {
	// State lists the instances of a GPU, whoever made them. The error wraps
	// gpu.ErrNotSupported on a GPU without MIG.
	State(ctx context.Context, pciAddress string) (gpu.MIGState, error)
	// Processes lists what runs on a GPU and on its instances.
	Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error)
	// Create makes a partition, or completes what is there, completely or not
	// at all.
	Create(ctx context.Context, at partition.Address, dynamic bool) (partition.Live, error)
	// Destroy succeeds when nothing is there, or a partition with another UUID,
	// which stays. An empty uuid stands for any.
	Destroy(ctx context.Context, at partition.Address, uuid string, dynamic bool) error
	// EnsureWhole fails when a GPU is divided.
	EnsureWhole(ctx context.Context, pciAddress string, dynamic bool) error
}

// CDI writes and removes a claim's spec. Both are idempotent.
type CDI interface {
	// Write returns the qualified name of each device.
	Write(ctx context.Context, claimUID types.UID, devices []cdi.Device) (map[string]string, error)
	Remove(claimUID types.UID) error
}

var (
	_ Partitions = (*partition.Lifecycle)(nil)
	_ CDI        = (*cdi.Specs)(nil)
)

// Options are all mandatory, except where a comment says otherwise.
type Options struct {
	// DriverName is the driver whose allocation results count.
	DriverName string
	// PoolName is this node's pool.
	PoolName string
	// DataDir holds the journal, the locks and what else is kept of claims.
	// Two instances of the plugin that run at the same time share it.
	DataDir string
	// Roots may be the zero value, which reads the running system.
	Roots      host.Roots
	Partitions Partitions
	Sharing    Sharing
	CDI        CDI

	// MPSHook is a program on the host that looks before a container starts
	// whether it can be an MPS client ("mps-supervisor container-hook").
	MPSHook string
	// Interposer is a library on the host that limits processes from inside of
	// containers. Optional: without it no time-slice share may be Limited.
	Interposer string
	// Cluster tells Reconcile which claims still exist. Optional: without it
	// none is taken for deleted.
	Cluster Cluster
	// Events is optional.
	Events Events
	// OrphanGrace is for how long a prepared claim that does not exist any more
	// is left to the kubelet. Default DefaultOrphanGrace.
	OrphanGrace time.Duration
}

// DefaultOrphanGrace is twice the time in which the kubelet looks for pods that
// are gone.
const DefaultOrphanGrace = 2 * time.Minute

// PreparedDevice is what the kubelet learns of a device.
type PreparedDevice struct {
	Requests     []string
	Pool         string
	Device       string
	CDIDeviceIDs []string
	ShareID      *types.UID
	// Admin marks a device that the claim only observes.
	Admin bool
}

// Manager is the only writer of claim state. All methods may be called
// concurrently, in several processes at once.
type Manager struct {
	driver, pool string
	roots        host.Roots
	partitions   Partitions
	sharing      Sharing
	cdi          CDI
	mpsHook      string
	limits       *limits
	cluster      Cluster
	orphanGrace  time.Duration
	// clock is bootTime.
	clock     func() time.Duration
	journal   *journal
	locks     *locks
	released  *tombstones
	inventory atomic.Pointer[device.Inventory]
	news      news
	orphans   orphans
	surveys   surveys
}

// NewManager makes the folders that are missing. It changes nothing else; what
// an earlier process left is for Reconcile.
func NewManager(o Options) (*Manager, error) {
	switch {
	case o.DriverName == "":
		return nil, errors.New("no driver name")
	case o.PoolName == "":
		return nil, errors.New("no pool name")
	case !filepath.IsAbs(o.DataDir):
		return nil, fmt.Errorf("data folder %q must be an absolute path", o.DataDir)
	case o.Partitions == nil || o.Sharing == nil || o.CDI == nil:
		return nil, errors.New("no hardware or no CDI")
	}
	m := &Manager{
		driver: o.DriverName, pool: o.PoolName, roots: o.Roots.Complete(), cdi: o.CDI,
		cluster: o.Cluster, orphanGrace: cmp.Or(o.OrphanGrace, DefaultOrphanGrace), clock: bootTime,
		mpsHook: o.MPSHook, limits: newLimits(filepath.Join(o.DataDir, "limits"), o.Interposer),
		news: news{events: o.Events},
	}
	var err error
	if m.journal, err = newJournal(filepath.Join(o.DataDir, "claims"), filepath.Join(o.DataDir, "quarantine")); err != nil {
		return nil, err
	}
	if m.locks, err = newLocks(filepath.Join(o.DataDir, "locks")); err != nil {
		return nil, err
	}
	if m.released, err = newTombstones(filepath.Join(o.DataDir, "released")); err != nil {
		return nil, err
	}
	m.partitions = watched{gpus: o.Partitions, locks: m.locks}
	m.sharing = watchedSharing{sharing: o.Sharing, locks: m.locks}
	return m, nil
}

// SetInventory says which devices exist from now on; it may be called again and
// again. Until the first call, Prepare fails and Unprepare works.
func (m *Manager) SetInventory(inventory *device.Inventory) { m.inventory.Store(inventory) }

var errNoInventory = fmt.Errorf("the GPUs of this node are not known yet: %w", gpu.ErrDriverNotLoaded)

func (m *Manager) plan(claim *resourceapi.ResourceClaim) (*Plan, error) {
	if err := checkUID(claim.UID); err != nil {
		return nil, err
	}
	inventory := m.inventory.Load()
	if inventory == nil {
		return nil, errNoInventory
	}
	return NewPlan(claim, Node{Driver: m.driver, Pool: m.pool, Inventory: inventory})
}
