// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
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

// clearTime bounds the wait for another claim that is being released. The
// kubelet gives a call 45 seconds.
const clearTime = 15 * time.Second

// Partitions are the effects on the hardware. They are idempotent, and the
// caller holds the GPU's lock. With dynamic false, MIG mode is never touched.
type Partitions interface {
	// Find looks for a complete partition.
	Find(ctx context.Context, at partition.Address) (partition.Live, bool, error)
	// Create makes a partition, or completes what is there, completely or not
	// at all.
	Create(ctx context.Context, at partition.Address, dynamic bool) (partition.Live, error)
	// Destroy succeeds when nothing is there.
	Destroy(ctx context.Context, at partition.Address, dynamic bool) error
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

// Options are all mandatory, except for Roots, whose zero value reads the
// running system.
type Options struct {
	// DriverName is the driver whose allocation results count.
	DriverName string
	// PoolName is this node's pool.
	PoolName string
	// DataDir holds the journal and the locks. Two instances of the plugin
	// that run at the same time share it.
	DataDir    string
	Roots      host.Roots
	Partitions Partitions
	CDI        CDI
}

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
	cdi          CDI
	journal      *journal
	locks        *locks
	inventory    atomic.Pointer[device.Inventory]
}

// NewManager makes the folders that are missing. It changes nothing else; what
// an earlier process left is for Resume.
func NewManager(o Options) (*Manager, error) {
	switch {
	case o.DriverName == "":
		return nil, errors.New("no driver name")
	case o.PoolName == "":
		return nil, errors.New("no pool name")
	case !filepath.IsAbs(o.DataDir):
		return nil, fmt.Errorf("data folder %q must be an absolute path", o.DataDir)
	case o.Partitions == nil || o.CDI == nil:
		return nil, errors.New("no hardware or no CDI")
	}
	journal, err := newJournal(filepath.Join(o.DataDir, "claims"))
	if err != nil {
		return nil, err
	}
	locks, err := newLocks(filepath.Join(o.DataDir, "locks"))
	if err != nil {
		return nil, err
	}
	return &Manager{
		driver: o.DriverName, pool: o.PoolName, roots: o.Roots.Complete(),
		partitions: o.Partitions, cdi: o.CDI, journal: journal, locks: locks,
	}, nil
}

// SetInventory says which devices exist from now on. Until the first call,
// Prepare fails and Unprepare works.
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
