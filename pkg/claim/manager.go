// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/claim/converge"
	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/spec"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Ref names a claim.
type Ref = record.Ref

// Partitions are the GPUs.
type Partitions interface {
	converge.Partitions
	// Processes lists what runs on a GPU and on its instances.
	Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error)
}

// Cluster is what the API server knows of claims.
type Cluster interface {
	// Claim returns the claim with this UID, or nil if there is none. An error means that this is not known now.
	Claim(ctx context.Context, claim Ref) (*resourceapi.ResourceClaim, error)
}

var (
	_ Partitions       = (*partition.Lifecycle)(nil)
	_ converge.Sharing = (*sharing.Manager)(nil)
	_ spec.CDI         = (*cdi.Specs)(nil)
)

// Options are all mandatory, except where a comment says otherwise.
type Options struct {
	// DriverName is the driver whose allocation results count.
	DriverName string
	// PoolName is this node's pool.
	PoolName string
	// DataDir holds the records, the locks and what else is kept of claims. Two instances of the plugin that run at the same
	// time share it.
	DataDir string
	// Roots may be the zero value, which reads the running system.
	Roots      host.Roots
	Partitions Partitions
	Sharing    converge.Sharing
	CDI        spec.CDI
	// Calls are the queues in which all effects on GPUs wait for each other: nobody gets a GPU with a call that has not
	// returned.
	Calls *call.Queues

	// Hook is a program on the host that checks before a container starts whether its limits hold (cmd/partage-hook).
	Hook string
	// Interposer is a library on the host that limits processes from inside of containers. Optional: without it no time-slice
	// share may be Limited.
	Interposer string
	// SELinuxContext is a setting for host.Roots.FileContext. Default host.SELinuxAuto.
	SELinuxContext string
	// Cluster tells which claims still have their devices.
	Cluster Cluster
	// Users finds the processes on GPUs that no claim explains.
	Users  converge.Users
	Events Events
	// OrphanGrace is how long a prepared claim that does not have its devices any more is left to the kubelet. Default
	// DefaultOrphanGrace.
	OrphanGrace time.Duration
	// CheckInterval is in what time the cluster is asked about each prepared claim once. Default DefaultCheckInterval.
	CheckInterval time.Duration

	// files and limits are those of the operating system, except in tests, and clock is host.SinceBoot.
	files  record.Files
	limits spec.SoftLimits
	clock  func() time.Duration
}

// DefaultOrphanGrace is twice the time in which the kubelet looks for pods that are gone.
const DefaultOrphanGrace = 2 * time.Minute

// Manager is the only writer of claim state. All methods may be called concurrently, in several processes at once.
type Manager struct {
	driver, pool string
	store        *record.Store
	locks        *lock.Locks
	specs        *spec.Specs
	engine       *converge.Engine
	events       Events
	surveyor     *surveyor
	// inventory is nil until the GPUs of this node are known.
	inventory atomic.Pointer[device.Inventory]
	// reconciling is by PCI address.
	reconciling singleflight.Group
	orphans     *orphans
	clock       func() time.Duration
}

// NewManager makes the folders that are missing. What an earlier process left is for Reconcile.
func NewManager(o Options) (*Manager, error) {
	switch {
	case o.DriverName == "":
		return nil, errors.New("no driver name")
	case o.PoolName == "":
		return nil, errors.New("no pool name")
	case !filepath.IsAbs(o.DataDir):
		return nil, fmt.Errorf("data folder %q must be an absolute path", o.DataDir)
	case o.Calls == nil, slices.Contains([]any{o.Partitions, o.Sharing, o.CDI, o.Users, o.Events, o.Cluster}, nil):
		return nil, errors.New("no hardware, no CDI, no cluster or no events")
	}
	if o.files == nil {
		label, err := o.Roots.FileContext(o.SELinuxContext)
		if err != nil {
			return nil, err
		}
		o.files, o.clock, o.limits.Remove = record.OS{}, host.SinceBoot, host.RemoveTmpfs
		o.limits.Mount = func(path string, bytes int64) error { return host.MountTmpfs(path, bytes, label) }
	}
	roots := o.Roots.Complete()
	boot, err := roots.BootID()
	if err != nil {
		return nil, err
	}
	m := &Manager{driver: o.DriverName, pool: o.PoolName, events: o.Events, clock: o.clock}
	if m.store, err = record.Open(o.DataDir, boot, o.files); err != nil {
		return nil, err
	}
	if m.locks, err = lock.New(o.DataDir, o.Calls); err != nil {
		return nil, err
	}
	m.store.Alone = m.locks.Alone
	o.limits.Dir, o.limits.Library = filepath.Join(o.DataDir, "limits"), o.Interposer
	m.specs = &spec.Specs{CDI: o.CDI, Roots: roots, Hook: o.Hook, Limits: o.limits}
	m.engine = &converge.Engine{
		Store: m.store, Locks: m.locks, Partitions: o.Partitions, Sharing: o.Sharing, Specs: m.specs, Clock: o.clock,
		Users: o.Users, Warn: o.Events.Warn, GPU: func(pciAddress string) *gpu.GPU { return m.devices().GPU(pciAddress) }, GPUs: m.GPUs,
	}
	m.surveyor = &surveyor{
		engine: m.engine, processes: o.Partitions.Processes, latest: map[string]surveyed{},
	}
	m.orphans = newOrphans(m, o)
	m.engine.Orphan, m.engine.Doubt = m.orphans.is, m.orphans.doubt
	return m, nil
}

// SetInventory says which devices exist from now on; it may be called again and
// again. Until the first call, Prepare fails and Unprepare works.
func (m *Manager) SetInventory(inventory *device.Inventory) { m.inventory.Store(inventory) }

// GPUs lists the PCI addresses of all GPUs, with claims and without.
func (m *Manager) GPUs() []string { return m.devices().PCIAddresses() }

// devices are those of this node, or none while they are not known.
func (m *Manager) devices() *device.Inventory { return cmp.Or(m.inventory.Load(), &device.Inventory{}) }

var errNoInventory = fmt.Errorf("the GPUs of this node are not known yet: %w", gpu.ErrDriverNotLoaded)

// Survey compares the records with the hardware of all GPUs in the inventory. It says
// which partitions others have made, and which devices must not be allocated now, and
// changes nothing.
//
// A GPU whose driver is not loaded has nothing to say, which readiness does.
func (m *Manager) Survey(ctx context.Context) device.Status {
	return m.surveyor.survey(ctx, m.devices())
}

// Unlooked lists the GPUs of the inventory of which no survey of this process knows anything yet, because they are slow or busy, or
// the MPS supervisor has not answered.
func (m *Manager) Unlooked() []string { return m.surveyor.unlooked(m.devices()) }

// InUse lists the devices that claims have, by name, whatever becomes of them; also those that they had before the machine
// was started anew, for the kubelet prepares them again. With an error there may be more than those.
func (m *Manager) InUse() ([]string, error) {
	snapshot := m.store.Snapshot()
	var err error
	if len(snapshot.Guards) > 0 {
		err = fmt.Errorf("which devices the claim of %s has cannot be read", snapshot.Guards[0].Path)
	}
	var names []string
	for _, r := range snapshot.All() {
		for i := range r.Devices {
			names = append(names, r.Devices[i].Device)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

// Claims lists the claims that have a record, whatever its state, those that have a device on the GPU first. With an error
// there may be more.
func (m *Manager) Claims(pciAddress string) ([]Ref, error) {
	var on, others []Ref
	snapshot := m.store.Snapshot()
	for _, r := range snapshot.Records {
		if slices.Contains(r.GPUs(), pciAddress) {
			on = append(on, r.Claim)
		} else {
			others = append(others, r.Claim)
		}
	}
	return append(on, others...), snapshot.Err
}

// RecordCounts counts the records by their state; those of earlier boots and those that cannot be read have one each. With an
// error there may be more.
func (m *Manager) RecordCounts() (map[string]int, error) {
	snapshot := m.store.Snapshot()
	counts := map[string]int{
		string(record.Preparing): 0, string(record.Prepared): 0, string(record.Releasing): 0,
		"earlier": len(snapshot.Earlier), "unreadable": len(snapshot.Guards),
	}
	for _, r := range snapshot.Records {
		counts[string(r.State)]++
	}
	return counts, snapshot.Err
}

// Changed returns a channel that is closed when this process next changes a record.
func (m *Manager) Changed() <-chan struct{} { return m.store.Changed() }
