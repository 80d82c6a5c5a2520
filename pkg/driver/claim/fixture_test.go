// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"testing"
	"testing/synctest"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/claimtest"
	"github.com/partage-dev/partage/test/must"
)

const (
	driverName = claimtest.DriverName
	poolName   = claimtest.PoolName
	pciA       = claimtest.PCIA
	pciB       = claimtest.PCIB
	pciC       = claimtest.PCIC
	wholeA     = claimtest.WholeA
	wholeB     = claimtest.WholeB
	wholeC     = claimtest.WholeC
	sliceA0    = claimtest.SliceA0
	sliceA1    = claimtest.SliceA1
	sliceA4    = claimtest.SliceA4
	halfA0     = claimtest.HalfA0
	halfA4     = claimtest.HalfA4
	sliceB0    = claimtest.SliceB0
	staticA0   = claimtest.StaticA0

	mpsA        = claimtest.MPSA
	mpsB        = claimtest.MPSB
	turnsA      = claimtest.TurnsA
	turnsC      = claimtest.TurnsC
	mpsSliceA0  = claimtest.MPSSliceA0
	turnSliceA0 = claimtest.TurnSliceA0
	fromClaim   = claimtest.FromClaim
	gpuMPS      = claimtest.GPUMPS
	gpuBad      = claimtest.GPUBad
	gpuLong     = claimtest.GPULong
	migMPS      = claimtest.MIGMPS
	ownMPS      = claimtest.OwnMPS
)

var (
	newShare      = claimtest.Share
	testNode      = claimtest.Node
	testInventory = claimtest.Inventory
	testPolicy    = claimtest.Policy
	newClaim      = claimtest.Claim
	configure     = claimtest.Configure
	admin         = claimtest.Admin
)

// runInBubble runs a test whose waiting takes no time.
func runInBubble(t *testing.T, name string, test func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
}

// onNode runs a test with a machine on which a plugin was started, and whose waiting takes no time.
func onNode(t *testing.T, test func(t *testing.T, b *box, m *Manager)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b, m := newNode(t)
		test(t, b, m)
	})
}

func runOnNode(t *testing.T, name string, test func(t *testing.T, b *box, m *Manager)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { onNode(t, test) })
}

// TestMain keeps what the many deaths have to say off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// newNode makes a machine and starts a plugin on it.
func newNode(t testing.TB) (*box, *Manager) {
	t.Helper()
	b := newBox(t)
	return b, b.manager()
}

func inventoryOf(t testing.TB, node *gpu.Node, terms device.Terms) *device.Inventory {
	t.Helper()
	return must.Get(device.NewInventory(node, terms))(t)
}

// newPair makes a machine on which two plugins run, as during an upgrade.
func newPair(t testing.TB) (b *box, one, other *Manager) {
	t.Helper()
	b = newBox(t)
	return b, b.manager(), b.manager()
}
