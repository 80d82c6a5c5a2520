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
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/spec"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
)

var (
	_ converge.Partitions = (*partition.Lifecycle)(nil)
	_ converge.Sharing    = (*sharing.Manager)(nil)
	_ spec.CDI            = (*cdi.Specs)(nil)
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
	Partitions converge.Partitions
	Sharing    converge.Sharing
	// Specs are what containers get, of which this needs CDI, Hook, Sockets and Interposer. Without the last no time-slice share may be
	// Limited.
	Specs spec.Specs
	// Calls are the queues in which all effects on GPUs wait for each other: nobody gets a GPU with a call that has not
	// returned.
	Calls *call.Queues

	// SELinuxContext is a setting for host.Roots.FileContext. Default host.SELinuxAuto.
	SELinuxContext string
	// Cluster tells which claims still have their devices.
	Cluster Cluster
	// Users finds the processes on GPUs that no claim explains.
	Users  converge.Users
	Events Events
	// Pods describes the pods that may still have the devices of a claim that is not in the cluster any more, "" for none. An error says
	// that it is not known.
	Pods func(ctx context.Context, claim Ref) (string, error)
	// OrphanGrace is how long a prepared claim that does not have its devices any more is left to the kubelet. Default
	// DefaultOrphanGrace.
	OrphanGrace time.Duration
	// CheckInterval is in what time the cluster is asked about each prepared claim once. Default DefaultCheckInterval.
	CheckInterval time.Duration

	// files, and how Specs mounts, are those of the operating system, except in tests, and clock is host.SinceBoot.
	files record.Files
	clock func() time.Duration
}

// Manager is the only writer of claim state. All methods may be called concurrently, in several processes at once.
type Manager struct {
	driver, pool string
	store        *record.Store
	locks        *lock.Locks
	engine       *converge.Engine
	// inventory is nil until the GPUs of this node are known.
	inventory atomic.Pointer[device.Inventory]
	// atWork are the GPUs that are being reconciled, and known has what came of that last, by PCI address.
	atWork   singleflight.Group
	statuses sync.Map
	orphans  *orphans
	clock    func() time.Duration
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
	case o.Calls == nil, o.Pods == nil, slices.Contains([]any{o.Partitions, o.Sharing, o.Specs.CDI, o.Users, o.Events, o.Cluster}, nil):
		return nil, errors.New("no hardware, no CDI, no cluster, no pods or no events")
	}
	if o.files == nil {
		label, err := o.Roots.FileContext(o.SELinuxContext)
		if err != nil {
			return nil, err
		}
		o.files, o.clock, o.Specs.Unmount = record.OS{}, host.SinceBoot, host.RemoveTmpfs
		o.Specs.Mount = func(path string, bytes int64) error { return host.MountTmpfs("partage", path, bytes, label) }
	}
	roots := o.Roots.Complete()
	boot, err := roots.BootID()
	if err != nil {
		return nil, err
	}
	m := &Manager{driver: o.DriverName, pool: o.PoolName, clock: o.clock}
	if m.store, err = record.Open(o.DataDir, boot, o.files); err != nil {
		return nil, err
	}
	if m.locks, err = lock.New(o.DataDir, o.Calls); err != nil {
		return nil, err
	}
	m.store.Alone = m.locks.Alone
	o.Specs.Roots, o.Specs.LimitsDir = roots, filepath.Join(o.DataDir, "limits")
	m.engine = &converge.Engine{
		Store: m.store, Locks: m.locks, Partitions: o.Partitions, Sharing: o.Sharing, Specs: &o.Specs, Clock: o.clock,
		Users: o.Users, Warn: o.Events.Warn, GPU: func(pciAddress string) *gpu.GPU { return m.devices().GPU(pciAddress) }, GPUs: m.GPUs,
		Shareable: func(pciAddress string) bool { return hasMPS(m.devices(), pciAddress) },
	}
	m.orphans = &orphans{
		engine: m.engine, cluster: o.Cluster, pods: o.Pods, driver: o.DriverName, pool: o.PoolName,
		grace: cmp.Or(o.OrphanGrace, DefaultOrphanGrace), interval: cmp.Or(o.CheckInterval, DefaultCheckInterval),
		budget: rate.NewLimiter(0, inquiryBurst), rechecks: make(chan struct{}, 1), claims: map[types.UID]inquiry{},
	}
	m.engine.Recheck = m.orphans.recheck
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

// Unobserved lists the GPUs of the inventory that this process could not observe yet, because they are slow or busy, or the MPS
// supervisor has not answered.
func (m *Manager) Unobserved() []string {
	return slices.DeleteFunc(m.GPUs(), func(address string) bool { return m.status(address).observed })
}

// Statements are what is known of claims on each GPU, and which claims are kept although they do not exist any
// more.
func (m *Manager) Statements() []Statement {
	var all []Statement
	for _, address := range m.GPUs() {
		all = append(all, m.status(address).claims...)
	}
	return append(all, m.status(orphaned).claims...)
}

// ReleaseOrphans releases prepared claims that do not have their devices any more, until ctx ends. It is called once.
func (m *Manager) ReleaseOrphans(ctx context.Context) { m.orphans.run(ctx) }

// InUse lists the devices that claims have, by name, whatever becomes of them; also those that they had before the machine
// was started anew, for the kubelet prepares them again. With an error there may be more than those.
func (m *Manager) InUse() ([]string, error) {
	snapshot := m.store.Snapshot()
	var err error
	if at := slices.IndexFunc(snapshot.Guards, func(g record.Guard) bool { return !g.Released }); at >= 0 {
		err = fmt.Errorf("which devices the claim of %s has cannot be read", snapshot.Guards[at].Path)
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
