// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package converge brings GPUs into the state that the records of claims describe, by the rules of package rules.
//
//	observe.go    one bounded reading of everything that is known about a GPU; records.go is its part about claims
//	act.go        carries out one task under the locks of its GPUs; act_record.go is its part about records, specs and sessions
//	round.go      locks, observes, decides and acts once
//	prepare.go    repeats that until the claim of a call is ready;
//	converge.go   until a claim is released, or nothing is left to do on a GPU
//
// It has no rules of its own. What it keeps in memory is for pace, and for messages about what could not be made because a GPU is
// in use.
package converge

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/spec"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

// Partitions observes and changes the instances of GPUs. Each change is one idempotent effect whose outcome was read
// back, or that the next one needs; a *partition.RefusedError had definitely no effect.
type Partitions interface {
	// State lists all instances of a GPU, foreign ones included. The error wraps gpu.ErrNotSupported on a GPU without MIG.
	State(ctx context.Context, pciAddress string) (gpu.MIGState, error)
	SetMode(ctx context.Context, pciAddress string, on bool) error
	CreateInstance(ctx context.Context, at partition.Address) (instanceID int, err error)
	CreateCompute(ctx context.Context, pciAddress string, instanceID int) (gpu.PartitionID, error)
	DestroyCompute(ctx context.Context, pciAddress string, instanceID, computeID int) error
	DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error
	// Processes lists what runs on a GPU and on its instances.
	Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error)
	// Holders describes the processes that hold a GPU, for people.
	Holders(ctx context.Context, pciAddress string) string
	// FabricPending returns how far the registration with the NVLink fabric is, or nothing if it is done.
	FabricPending(ctx context.Context, pciAddress string) (string, error)
}

// Sharing observes and changes what makes GPUs shared.
type Sharing interface {
	// Sessions returns those of the node by ID. The error wraps sharing.ErrNoSupervisor when they cannot be known.
	Sessions(ctx context.Context) (map[string]mps.Status, error)
	// Ensure makes a session run on these devices, or changes the limits of the running one.
	Ensure(ctx context.Context, spec mps.Spec, devices []sharing.Device) (mps.Status, error)
	// End succeeds if there is no such session.
	End(ctx context.Context, id string) error
	Mode(ctx context.Context, d sharing.Device) (gpu.ComputeMode, error)
	SetExclusive(ctx context.Context, d sharing.Device, exclusive bool) error
	// SetInterval sets the time slice of a whole GPU; IntervalDefault takes back what was set.
	SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error
}

// Users finds the processes on a GPU that no claim explains.
type Users interface {
	// Users returns, in bounded time, the processes on the undivided GPU, those on GPU instances by ID, and those that have had its
	// device node open, and nothing else, for so long that they do not keep it back. Processes of these claims do not count. Where
	// the orphan, which may be nil, has devices, even processes count that use GPUs without a claim as a rule.
	Users(ctx context.Context, pciAddress string, claims []*record.Record, orphan *record.Record) (users string, ofInstances map[int]string, opened string)
}

// Engine observes GPUs, decides and acts. All methods may be called concurrently, in several processes at once.
type Engine struct {
	Store      *record.Store
	Locks      *lock.Locks
	Partitions Partitions
	Sharing    Sharing
	Specs      *spec.Specs
	Users      Users
	// Warn makes an event about a claim. It must not block.
	Warn func(ctx context.Context, claim record.Ref, reason, message string)
	// Clock is the time since the machine started.
	Clock func() time.Duration
	// GPU returns nil while a GPU is not known.
	GPU func(pciAddress string) *gpu.GPU
	// Shareable reports whether shares of a GPU by MPS are offered.
	Shareable func(pciAddress string) bool
	// GPUs lists the PCI addresses of all GPUs of the node.
	GPUs func() []string
	// Recheck asks the API server soon whether a claim that another one waits for still exists. It must not block.
	Recheck func(other types.UID)

	// calls are the Prepares at work in this process, *Call by the claim's UID.
	calls sync.Map
	// intervals are the GPUs whose time slice this process has set, and whose NVIDIA driver has answered ever since: if it was loaded
	// again, it has forgotten it.
	intervals sync.Map
	// silence is nil while the MPS supervisor answers.
	silence atomic.Pointer[silence]
	inUse   inUse
}

// call returns the Prepare for a claim that is at work in this process, or nil.
func (e *Engine) call(claim types.UID) *Call {
	c, _ := e.calls.Load(claim)
	call, _ := c.(*Call)
	return call
}
