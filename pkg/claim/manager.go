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

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/claim/survey"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/steptime"
)

// What callers see of the packages below.
type (
	// Ref names a claim.
	Ref = journal.Ref
	// CorruptError is a journal file that could not be understood.
	CorruptError = journal.CorruptError
	// OverlapError says that a device uses a part of a GPU that another claim holds.
	OverlapError = step.OverlapError
)

// Partitions are the GPUs.
type Partitions interface {
	step.Partitions
	// Processes lists what runs on a GPU and on its instances.
	Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error)
}

// Cluster is what the API server knows of claims.
type Cluster interface {
	// Claim returns the claim with this UID, or nil if there is none. An error means
	// that this is not known now.
	Claim(ctx context.Context, claim Ref) (*resourceapi.ResourceClaim, error)
}

var (
	_ Partitions = (*partition.Lifecycle)(nil)
	_ step.CDI   = (*cdi.Specs)(nil)
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
	Sharing    step.Sharing
	CDI        step.CDI

	// Hook is a program on the host that checks before a container starts whether its
	// limits hold (cmd/partage-hook).
	Hook string
	// Interposer is a library on the host that limits processes from inside of
	// containers. Optional: without it no time-slice share may be Limited.
	Interposer string
	// SELinuxContext is a setting for host.Roots.FileContext. Default host.SELinuxAuto.
	SELinuxContext string
	// Cluster tells which claims still have their devices. Optional: without it none is
	// taken for released.
	Cluster Cluster
	// Events is optional.
	Events Events
	// OrphanGrace is how long a prepared claim that does not have its devices any more
	// is left to the kubelet. Default DefaultOrphanGrace.
	OrphanGrace time.Duration
	// CheckInterval is in what time the cluster is asked about each prepared claim once.
	// Default DefaultCheckInterval.
	CheckInterval time.Duration

	// files and limitFiles are those of the operating system, except in tests, and
	// clock is bootTime.
	files      journal.Files
	limitFiles step.LimitFiles
	clock      func() time.Duration
}

// DefaultOrphanGrace is twice the time in which the kubelet looks for pods that
// are gone.
const DefaultOrphanGrace = 2 * time.Minute

// Manager is the only writer of claim state. All methods may be called
// concurrently, in several processes at once.
type Manager struct {
	*engine
	driver, pool string
	surveyor     *survey.Surveyor
	reconciler   *reconciler
}

// engine is what all work on claims needs.
type engine struct {
	roots      host.Roots
	store      *journal.Store
	locks      *lock.Locks
	kit        *step.Kit
	partitions Partitions
	inventory  atomic.Pointer[device.Inventory]
	events     eventLog
	failing    failures
	// inquiries is nil where there is no cluster to ask.
	inquiries *inquiries
	clock     func() time.Duration
}

// NewManager makes the folders that are missing and sets aside what cannot be read of an
// earlier boot. What else an earlier process left is for Reconcile.
func NewManager(ctx context.Context, o Options) (*Manager, error) {
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
	if o.files == nil {
		label, err := o.Roots.FileContext(o.SELinuxContext)
		if err != nil {
			return nil, err
		}
		o.files, o.limitFiles, o.clock = journal.OS{}, step.OSLimitFiles{Context: label}, bootTime
	}
	e := &engine{roots: o.Roots.Complete(), events: eventLog{events: o.Events}, clock: o.clock}
	boot, err := e.roots.BootID()
	if err != nil {
		return nil, err
	}
	if e.store, err = journal.Open(ctx, o.DataDir, boot, o.files); err != nil {
		return nil, err
	}
	if e.locks, err = lock.New(filepath.Join(o.DataDir, "locks")); err != nil {
		return nil, err
	}
	if o.Cluster != nil {
		e.inquiries = newInquiries(cmp.Or(o.CheckInterval, DefaultCheckInterval))
	}
	e.partitions = guardedPartitions{partitions: o.Partitions, locks: e.locks}
	e.kit = &step.Kit{
		Partitions: e.partitions,
		Sharing:    guardedSharing{sharing: o.Sharing, locks: e.locks},
		CDI:        o.CDI, Roots: e.roots, Hook: o.Hook,
		Limits: step.SoftLimits{Dir: filepath.Join(o.DataDir, "limits"), Library: o.Interposer, Files: o.limitFiles},
	}
	surveyor := survey.New(e.store, e.locks, e.kit, e.clock, e.failing.last)
	return &Manager{
		engine: e, driver: o.DriverName, pool: o.PoolName, surveyor: surveyor,
		reconciler: &reconciler{
			engine: e, driver: o.DriverName, pool: o.PoolName, surveyor: surveyor,
			cluster: o.Cluster, orphanGrace: cmp.Or(o.OrphanGrace, DefaultOrphanGrace),
		},
	}, nil
}

// SetInventory says which devices exist from now on; it may be called again and
// again. Until the first call, Prepare fails and Unprepare works.
func (m *Manager) SetInventory(inventory *device.Inventory) { m.inventory.Store(inventory) }

// GPUs lists the PCI addresses of all GPUs, with claims and without.
func (m *Manager) GPUs() []string {
	inventory := m.inventory.Load()
	if inventory == nil {
		return nil
	}
	return inventory.PCIAddresses()
}

var errNoInventory = fmt.Errorf("the GPUs of this node are not known yet: %w", gpu.ErrDriverNotLoaded)

// Survey compares the journal with the hardware of all GPUs in the inventory. It says
// which partitions others have made, and which devices must not be allocated now, and
// changes nothing.
//
// A GPU whose driver is not loaded has nothing to say, which readiness does.
func (m *Manager) Survey(ctx context.Context) device.Status {
	inventory := m.inventory.Load()
	if inventory == nil {
		return device.Status{}
	}
	return m.surveyor.Survey(ctx, inventory)
}

// InUse lists the devices that claims have, by name, whatever becomes of them; also
// those that they had before the machine was started anew, for the kubelet prepares
// them again. With an error there may be more than those.
func (m *Manager) InUse() ([]string, error) {
	snapshot, err := m.store.Snapshot()
	if err != nil {
		return nil, err
	}
	if len(snapshot.Unreadable) > 0 {
		err = fmt.Errorf("which devices the claim of %s has cannot be read", snapshot.Unreadable[0].Path)
	}
	var names []string
	for _, r := range slices.Concat(snapshot.Records, snapshot.Earlier) {
		for i := range r.Devices {
			names = append(names, r.Devices[i].Device)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

// Claims lists the claims that have a record, whatever its state, those that have a device
// on the GPU first.
func (m *Manager) Claims(pciAddress string) ([]Ref, error) {
	snapshot, err := m.store.Snapshot()
	if err != nil {
		return nil, err
	}
	var on, others []Ref
	for _, r := range snapshot.Records {
		if slices.ContainsFunc(r.Devices, func(d journal.Device) bool { return d.PCIAddress == pciAddress }) {
			on = append(on, r.Claim)
		} else {
			others = append(others, r.Claim)
		}
	}
	return append(on, others...), nil
}

// load reads the record of a claim whose lock the caller holds, and tells people
// when it cannot be read.
func (e *engine) load(ctx context.Context, uid types.UID) (*journal.Record, error) {
	r, err := e.store.Load(ctx, uid)
	var corrupt *CorruptError
	switch {
	case errors.As(err, &corrupt):
		e.events.once(ctx, Ref{UID: uid}, ReasonDamagedRecord, corrupt.Path, fmt.Sprintf(
			"The journal file of the claim was damaged (%v) and is now %s. When the claim is prepared again all is well. "+
				"Otherwise partitions of it may be left on this node: once no pod uses them, remove them with "+
				"nvidia-smi mig -dci and -dgi and then remove the file, or restart the node.", corrupt.Err, corrupt.Path))
	case errors.Is(err, journal.ErrOtherVersion):
		e.events.once(ctx, Ref{UID: uid}, ReasonOtherVersion, err.Error(), fmt.Sprintf(
			"%v. Only the version of the driver that wrote the file can prepare or release the claim.", err))
	}
	return r, err
}

// save writes a record.
func (e *engine) save(ctx context.Context, r *journal.Record) error {
	defer steptime.Of(ctx).Begin(steptime.Journal)()
	return e.store.Save(r)
}

// bury writes down that a claim is to be released, see [journal.Store.Bury].
func (e *engine) bury(ctx context.Context, uid types.UID, arrived time.Duration) (written bool, err error) {
	defer steptime.Of(ctx).Begin(steptime.Journal)()
	return e.store.Bury(uid, arrived)
}

// remove removes the record of a claim, if there is one.
func (e *engine) remove(ctx context.Context, uid types.UID) error {
	defer steptime.Of(ctx).Begin(steptime.Journal)()
	return e.store.Delete(uid)
}

// lockTime bounds the wait for a lock where pods must be able to end. Another process
// may hold it until a call returns that never does, and that cannot be seen from here.
const lockTime = 10 * time.Second

// lockSoon locks GPUs within lockTime, and within ctx.
func (e *engine) lockSoon(ctx context.Context, pciAddresses []string) (func(), error) {
	ctx, cancel := context.WithTimeout(ctx, lockTime)
	defer cancel()
	return e.locks.GPUs(ctx, pciAddresses)
}

// scene looks at what the steps of a group need to know. The caller holds its locks.
func (e *engine) scene(ctx context.Context, part *journal.Record, attempt step.Attempt) (*step.Scene, error) {
	snapshot, err := e.store.Snapshot()
	if err != nil {
		return nil, err
	}
	s := &step.Scene{Record: part, Others: snapshot.Others(part.Claim.UID), Attempt: attempt}
	if s.Instances, err = e.instances(ctx, part); err != nil {
		return nil, err
	}
	if len(part.Sessions) > 0 {
		_, s.Supervisor = e.kit.Sessions(ctx)
	}
	return s, nil
}

// instances lists those on the GPUs on which a record has partitions.
func (e *engine) instances(ctx context.Context, r *journal.Record) (map[string][]gpu.Instance, error) {
	found := map[string][]gpu.Instance{}
	for i := range r.Devices {
		d := &r.Devices[i]
		if _, known := found[d.PCIAddress]; known || d.Partition == nil {
			continue
		}
		state, err := e.partitions.State(ctx, d.PCIAddress)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Device, err)
		}
		found[d.PCIAddress] = state.Instances
	}
	return found, nil
}
