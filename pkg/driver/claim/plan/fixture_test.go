// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/test/claimtest"
)

const (
	driverName = claimtest.DriverName
	poolName   = claimtest.PoolName
	pciA       = claimtest.PCIA
	pciC       = claimtest.PCIC
	wholeA     = claimtest.WholeA
	wholeB     = claimtest.WholeB
	wholeC     = claimtest.WholeC
	sliceA0    = claimtest.SliceA0
	sliceA1    = claimtest.SliceA1
	sliceA4    = claimtest.SliceA4
	halfA4     = claimtest.HalfA4
	sliceB0    = claimtest.SliceB0
	staticA0   = claimtest.StaticA0

	mpsA        = claimtest.MPSA
	turnsC      = claimtest.TurnsC
	mpsSliceA0  = claimtest.MPSSliceA0
	turnSliceA0 = claimtest.TurnSliceA0
	fromClass   = claimtest.FromClass
	fromClaim   = claimtest.FromClaim
	gpuConfig   = claimtest.GPUConfig
	migConfig   = claimtest.MIGConfig
	gpuSlicing  = claimtest.GPUSlicing
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
	newClaim      = claimtest.Claim
	configure     = claimtest.Configure
	admin         = claimtest.Admin
	result        = claimtest.Result
)

// TestMain keeps what the many deaths have to say off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}
