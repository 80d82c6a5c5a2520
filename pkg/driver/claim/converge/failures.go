// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
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
