// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"slices"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// Gate holds calls until the test lets them go: a GPU that is slow, without waiting for it.
type Gate struct {
	*Fault
}

// Hold holds every call of a function of NVML on a GPU from now on, or those of all functions with "*". With state.SMI it
// holds runs of nvidia-smi. A GPU of -1 is any, and also holds calls that are on none, as those that start NVML.
func (n *GPUs) Hold(t testing.TB, function string, gpu int) *Gate {
	t.Helper()
	return &Gate{n.Inject(t, machine.Fault{Function: function, GPU: gpu, Hang: true, Effect: machine.Proceed})}
}

// Held returns the calls that are held now, the oldest first.
func (g *Gate) Held() ([]state.Held, error) {
	all, err := g.n.State.Held()
	return slices.DeleteFunc(all, func(c state.Held) bool { return c.Fault != g.id }), err
}

// CheckHeld fails unless a number of calls, or more, are held.
func (g *Gate) CheckHeld(count int) error {
	held, err := g.Held()
	if err == nil && len(held) < count {
		err = fmt.Errorf("%d calls are held, want %d: %+v", len(held), count, held)
	}
	return err
}

// UntilHeld waits until a number of calls, or more, are held.
func (g *Gate) UntilHeld(t testing.TB, count int) {
	t.Helper()
	must.Do(t, Eventually(t.Context(), func() error { return g.CheckHeld(count) }))
}

// LetGo lets the oldest calls go on, which are held. Those that come later are held. Remove lets all go.
func (g *Gate) LetGo(t testing.TB, count int) {
	t.Helper()
	must.Do(t, g.n.State.LetGo(g.id, count))
}
