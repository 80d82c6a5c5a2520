// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// Fault is a fault that is in force until it is removed.
type Fault struct {
	n  *GPUs
	id int
}

// TryInject is Inject for any goroutine.
func (n *GPUs) TryInject(f machine.Fault) (*Fault, error) {
	i := &Fault{n: n}
	err := n.State.Update(func(m *machine.Machine) error {
		i.id = state.AddFault(m, f)
		return nil
	})
	return i, err
}

// Inject makes calls go wrong until the fault is removed.
func (n *GPUs) Inject(t testing.TB, f machine.Fault) *Fault {
	t.Helper()
	return must.Get(n.TryInject(f))(t)
}

// TryRemove ends the fault and returns how many calls it struck.
func (i *Fault) TryRemove() (struck uint64, err error) {
	err = i.n.State.Update(func(m *machine.Machine) error {
		at := slices.IndexFunc(m.Faults, func(f machine.Fault) bool { return f.ID == i.id })
		if at < 0 {
			return fmt.Errorf("fault %d is not there", i.id)
		}
		struck = m.Faults[at].Struck
		state.RemoveFault(m, i.id)
		return nil
	})
	return struck, err
}

// Remove ends the fault.
func (i *Fault) Remove(t testing.TB) {
	t.Helper()
	must.Get(i.TryRemove())(t)
}

// UntilStruck waits until a call was struck.
func (i *Fault) UntilStruck(t testing.TB, p *Driver) {
	t.Helper()
	p.Until(t, "a call that is struck by the fault", func(context.Context) error { return i.CheckStruck() })
}

// CheckStruck fails unless a call was struck.
func (i *Fault) CheckStruck() error {
	m, err := i.n.State.Snapshot()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(m.Faults, func(f machine.Fault) bool { return f.ID == i.id && f.Struck > 0 }) {
		return errors.New("no call was struck yet")
	}
	return nil
}

// IsChange reports whether a function of NVML changes the GPU, judging by its name.
func IsChange(function string) bool {
	return strings.Contains(function, "Set") || strings.Contains(function, "Create") || strings.Contains(function, "Destroy")
}

// Some values of nvmlReturn_t.
const (
	NVMLNoPermission  = 4
	NVMLTimeout       = 10
	NVMLGPUIsLost     = 15
	NVMLResetRequired = 16
	NVMLInUse         = 19
	NVMLMemory        = 20
	NVMLNoResources   = 23
	NVMLUnknown       = 999
)
