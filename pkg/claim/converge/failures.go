// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Failures are what has failed last. They are for messages, events and taints only, and lost with the process.
type Failures struct {
	// tasks are errors by task, and inUse a rules.Statement by PCI address.
	tasks, inUse sync.Map
}

type task struct {
	claim types.UID
	gpu   string
}

// note remembers why a task for a claim has failed, or that it has not.
func (f *Failures) note(claim types.UID, pciAddress string, err error) {
	if key := (task{claim, pciAddress}); err == nil {
		f.tasks.Delete(key)
	} else {
		f.tasks.Store(key, err)
	}
}

// Of returns why the last task for a claim on a GPU has failed, or nil.
func (f *Failures) Of(claim types.UID, pciAddress string) error {
	last, _ := f.tasks.Load(task{claim, pciAddress})
	err, _ := last.(error)
	return err
}

// Retain forgets all claims without a record.
func (f *Failures) Retain(known *record.Snapshot) {
	f.tasks.Range(func(key, _ any) bool {
		if t, _ := key.(task); known.Of(t.claim) == nil {
			f.tasks.Delete(key)
		}
		return true
	})
}

// noteUse remembers what could not be made because somebody uses a GPU, until something can.
func (f *Failures) noteUse(a rules.Action, err error) {
	switch {
	case a.Do != rules.CreateGI && a.Do != rules.SetExclusive && a.Do != rules.StartSession:
	case errors.Is(err, gpu.ErrInUse):
		f.inUse.Store(a.GPU, rules.Statement{Place: a.Place, Device: a.Session, Reason: rules.UsedByOthers, Text: err.Error()})
	case err == nil:
		f.inUse.Delete(a.GPU)
	}
}

// InUse returns what could not be made on a GPU last because somebody uses it, if that is still so as far as is known.
func (f *Failures) InUse(pciAddress string) (s rules.Statement, found bool) {
	last, _ := f.inUse.Load(pciAddress)
	s, found = last.(rules.Statement)
	return s, found
}

// NotInUse lets it be tried again.
func (f *Failures) NotInUse(pciAddress string) { f.inUse.Delete(pciAddress) }

var (
	// ErrTaken means that other claims have the place, or all shares.
	ErrTaken = errors.New("other claims have it")
	// ErrGuarded means that a claim whose record cannot be read may have the place.
	ErrGuarded = errors.New("a record cannot be read")
)

// causes are what verdicts mean for errors.Is.
var causes = map[rules.Code]error{
	rules.Overlap: ErrTaken, rules.SharesTaken: ErrTaken, rules.Divided: partition.ErrDivided, rules.Foreign: partition.ErrForeign,
	rules.InUse: gpu.ErrInUse, rules.NoSupervisor: sharing.ErrNoSupervisor, rules.Guarded: ErrGuarded,
	rules.NotRegistered: gpu.ErrFabricPending,
}

// VerdictError is why a claim cannot be prepared or released now. It wraps what the verdict is about: ErrTaken, ErrGuarded,
// partition.ErrDivided, partition.ErrForeign, gpu.ErrInUse, sharing.ErrNoSupervisor, gpu.ErrFabricPending, or why the GPU has not answered.
type VerdictError struct {
	rules.Verdict
	// cause is why the GPU has not answered, or nil.
	cause error
	// waited means that the place was waited for.
	waited bool
}

func (e *VerdictError) Error() string {
	if e.waited && (e.Code == rules.Overlap || e.Code == rules.SharesTaken) {
		return e.Why + ", and was not released in time"
	}
	return e.Why
}

func (e *VerdictError) Unwrap() error { return errors.Join(causes[e.Code], e.cause) }
