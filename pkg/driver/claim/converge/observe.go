// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
)

// observation is a rules.Observation, with what acting on it needs besides.
type observation struct {
	rules.Observation
	engine   *Engine
	snapshot *record.Snapshot
	// calls are the preparations that are at work in this process.
	calls map[types.UID]*Call
	// needsSession means that it is for a claim with an MPS session.
	needsSession bool
	// sessions are those of the MPS supervisor, by ID. They are empty where it was not asked.
	sessions map[string]mps.Status
	// orphan is the claim whose processes are wanted, as if it did not exist, or nil.
	orphan *record.Record
}

// observe reads what the rules need to know about a GPU for the claim of a record. If of is nil, it is for all claims, and also finds
// what no record calls for, and whether CDI specs are up to date. The caller has the GPU's lock, unless lockErr says why not.
func (e *Engine) observe(ctx context.Context, pciAddress string, of *record.Record, lockErr error) *observation {
	// A spec without a record was left behind, or its claim is just being prepared: before it is removed, lockOther reads the record again.
	specs, folders, _ := e.Specs.List() // what cannot be listed is neither stale nor up to date
	o := e.observeRecords(pciAddress)
	o.needsSession = of != nil && len(of.Sessions) > 0
	o.Guards = slices.DeleteFunc(slices.Clone(o.snapshot.Guards), func(g record.Guard) bool {
		return g.GPUs != nil && !slices.Contains(g.GPUs, pciAddress) || slices.Contains(g.Cleared, pciAddress)
	})
	if lockErr != nil {
		o.unanswered(lockErr)
	} else {
		needs := o.Needs()
		if of == nil {
			// While a prepared claim has a part of the GPU, no other claim gets all of it, so that its other users do not matter.
			isPrepared := o.has(func(r *record.Record, d *record.Device) bool { return r.State == record.Prepared && !d.Admin })
			needs = rules.Needs{Mode: true, Fabric: needs.Fabric, Users: needs.Users || !isPrepared, Sessions: true}
		}
		o.observeHardware(ctx, needs)
	}
	o.observeSpecs(ctx, specs, folders, of == nil)
	return o
}

// unanswered notes why the GPU could not be observed.
func (o *observation) unanswered(err error) {
	o.Hardware = rules.Hardware{Err: fmt.Errorf("GPU %s: %w", o.GPU, err)}
}

func (o *observation) observeHardware(ctx context.Context, needs rules.Needs) {
	e := o.engine
	if needs.Sessions {
		o.observeSessions(ctx) // needs no answer of the GPU
	}
	h := &o.Hardware
	var err error
	h.MIGState, err = e.Partitions.State(ctx, o.GPU)
	// Drivers that fail may say "not supported". A GPU on which a claim has a partition, or which can have any, has MIG.
	isDivisible := func(_ *record.Record, d *record.Device) bool { return d.Divisible || d.Partition != nil }
	if errors.Is(err, gpu.ErrNotSupported) && !o.has(isDivisible) {
		err = nil
	}
	if needs.Mode && err == nil {
		err = o.observeMode(ctx)
	}
	if err != nil {
		o.unanswered(err)
		e.intervals.Delete(o.GPU)
		return
	}
	_, known := e.intervals.Load(o.GPU)
	h.Instances, h.IntervalLost = slices.Clone(h.Instances), !known // acting adds its own
	if g := e.GPU(o.GPU); g != nil && g.MIG != nil {
		h.Profiles = g.MIG.Profiles
	}
	if needs.Fabric {
		// Where that is not known the GPU is used: most have no fabric.
		h.Fabric, _ = e.Partitions.FabricPending(ctx, o.GPU)
	}
	if needs.Users {
		isOwner := func(r *record.Record) bool {
			return r.State == record.Prepared && (o.orphan == nil || r.Claim != o.orphan.Claim)
		}
		owners := slices.DeleteFunc(slices.Clone(o.snapshot.Records), func(r *record.Record) bool { return !isOwner(r) })
		h.Users, h.InstanceUsers, h.Opened = e.Users.Users(ctx, o.GPU, owners, o.orphan)
	}
}

// UsersOf describes the processes that use a claim's devices on a GPU, or returns "". The claim itself explains no process. The caller
// has the claim's lock. An error says why the processes are not known.
func (e *Engine) UsersOf(ctx context.Context, r *record.Record, pciAddress string) (string, error) {
	o := e.observeRecords(pciAddress)
	o.orphan = r
	if _, own := o.UsersOf(r.Claim.UID); !own {
		return "", o.snapshot.Err
	}
	o.observeHardware(ctx, rules.Needs{Users: true})
	users, _ := o.UsersOf(r.Claim.UID)
	return users, o.Hardware.Err
}

// has reports whether some record has a device on the GPU for which is returns true.
func (o *observation) has(is func(*record.Record, *record.Device) bool) bool {
	return slices.ContainsFunc(o.Records, func(r rules.Record) bool {
		return slices.ContainsFunc(r.Devices, func(d record.Device) bool { return d.PCIAddress == o.GPU && is(r.Record, &d) })
	})
}

// observeMode asks for the compute mode where MIG mode leaves the GPU one.
func (o *observation) observeMode(ctx context.Context) error {
	if o.Hardware.Enabled {
		return nil
	}
	uuid := o.uuid()
	if uuid == "" {
		o.Hardware.ModeUnknown = true
		return nil
	}
	mode, err := o.engine.Sharing.Mode(ctx, sharing.Device{PCIAddress: o.GPU, UUID: uuid})
	o.Hardware.Exclusive = mode == gpu.ComputeExclusiveProcess
	o.Hardware.OtherMode = err == nil && mode != gpu.ComputeExclusiveProcess && mode != gpu.ComputeDefault
	// It has a mode if that was set for a session that has started.
	isSet := func(_ *record.Record, d *record.Device) bool {
		return d.Partition == nil && d.Shared().Session != "" && d.Mark == record.Started
	}
	o.Hardware.NoMode = errors.Is(err, gpu.ErrNotSupported) && !o.has(isSet)
	if o.Hardware.NoMode {
		return nil
	}
	return err
}

// uuid is the GPU's UUID. While the GPU is not discovered yet, it is taken from a record.
func (o *observation) uuid() string {
	if g := o.engine.GPU(o.GPU); g != nil {
		return g.UUID
	}
	for _, d := range o.snapshot.On(o.GPU) {
		if d.Sharing != nil && d.Sharing.UUID != "" {
			return d.Sharing.UUID
		}
	}
	return ""
}

// sessionsTime bounds a request to the MPS supervisor, a process on this machine, for its sessions.
const sessionsTime = 2 * time.Second

// silence says since when the MPS supervisor has not answered, and why. Each round asks it again before it locks a GPU. While the round has
// the lock, it asks only for a claim that needs a session.
type silence struct {
	since time.Duration
	err   error
}

// SilentFor is how long the MPS supervisor has not answered.
func (e *Engine) SilentFor() time.Duration {
	if silent := e.silence.Load(); silent != nil {
		return e.Clock() - silent.since
	}
	return 0
}

// sessions asks the MPS supervisor which sessions there are.
func (e *Engine) sessions(ctx context.Context) (map[string]mps.Status, error) {
	limited, cancel := context.WithTimeout(ctx, sessionsTime)
	defer cancel()
	found, err := e.Sharing.Sessions(limited)
	switch {
	case err == nil:
		e.silence.Store(nil)
	case ctx.Err() == nil: // otherwise it was not the supervisor that gave up
		e.silence.CompareAndSwap(nil, &silence{e.Clock(), err})
	}
	return found, err
}

func (o *observation) observeSessions(ctx context.Context) {
	ask := o.engine.sessions
	if silent := o.engine.silence.Load(); silent != nil && !o.needsSession {
		ask = func(context.Context) (map[string]mps.Status, error) { return nil, silent.err }
	}
	found, err := ask(ctx)
	if err != nil {
		o.Unsupervised, o.Shareable = err, o.engine.Shareable(o.GPU)
		return
	}
	maps.Copy(o.sessions, found)
	for i := range o.Records {
		if r := &o.Records[i]; r.State == record.Prepared {
			r.News = slices.ContainsFunc(r.Sessions, func(s record.Session) bool { return hasNews(s, found) })
		}
	}
	name := device.GPUName(o.GPU)
	for _, id := range slices.Sorted(maps.Keys(found)) {
		status := found[id]
		on := id == name || strings.HasPrefix(id, name+"-") || slices.Contains(status.Spec.Devices, o.uuid())
		if !on || len(status.Spec.Devices) == 0 {
			continue
		}
		s := rules.Session{ID: id, Demand: demandOf(status.Spec), GPUs: o.gpusWith(status.Spec.Devices), Running: status.Phase == mps.Running}
		// One that starts for the first time is not unwell: its claim waits for it.
		if !s.Running && (status.Phase != mps.Starting || status.Losses > 0) {
			s.Unwell = fmt.Sprintf("MPS on device %s is %s: %s", id, status.Phase, status.Message)
		}
		o.Sessions = append(o.Sessions, s)
	}
}

// gpusWith returns the PCI addresses of the GPUs with these UUIDs.
func (o *observation) gpusWith(uuids []string) []string {
	return slices.DeleteFunc(slices.Clone(o.engine.GPUs()), func(address string) bool {
		g := o.engine.GPU(address)
		return g == nil || !slices.Contains(uuids, g.UUID)
	})
}

func demandOf(s mps.Spec) rules.Demand {
	d := rules.Demand{Priority: policy.ClientPriority(s.ClientPriority), OnClientKilled: policy.OnClientKilled(s.OnClientKilled)}
	d.Percent = s.ThreadPercentage
	for _, memory := range s.Memory {
		d.MemoryBytes = memory
	}
	return d
}

// specsTime bounds reading, or writing, CDI specs while a GPU is locked.
const specsTime = 2 * time.Second

// observeSpecs finds the CDI specs of claims on this GPU, and of claims that nothing on this node knows. A folder that was left
// alone is the rest of one.
func (o *observation) observeSpecs(ctx context.Context, specs, folders []types.UID, everything bool) {
	// Going through the driver's folder may take long, and must not keep the GPU.
	ctx, cancel := context.WithTimeout(ctx, specsTime)
	defer cancel()
	unreadable := o.snapshot.IsGuarded("")
	for _, uid := range slices.Concat(specs, folders) {
		r := o.snapshot.Of(uid)
		switch {
		case r == nil && (unreadable || o.calls[uid] != nil || o.snapshot.IsGuarded(uid)):
			continue
		case r != nil && !hasGPU(r, o.GPU):
			continue
		}
		s := rules.Spec{Claim: uid, Outdated: slices.Contains(folders, uid)}
		if everything && r != nil && r.State == record.Prepared && r.BootID == o.Boot {
			matches, err := o.engine.Specs.Matches(ctx, r)
			s.Outdated = err == nil && !matches
		}
		o.Specs = append(o.Specs, s)
	}
}

func hasGPU(r *record.Record, pciAddress string) bool {
	return slices.ContainsFunc(r.Devices, func(d record.Device) bool { return d.PCIAddress == pciAddress })
}
