// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
)

func newKnown(t *testing.T) *knownGPUs {
	t.Helper()
	return &knownGPUs{file: lastseen.New(t.TempDir(), "boot-1")}
}

func inventoryOf(t *testing.T, node *gpu.Node) *device.Inventory {
	t.Helper()
	inventory, err := device.NewInventory(node, device.Terms{})
	if err != nil {
		t.Fatal(err)
	}
	return inventory
}

// pciAddresses are those of the GPUs that have devices.
func pciAddresses(inventory *device.Inventory) []string {
	var all []string
	for _, d := range inventory.Devices() {
		all = append(all, d.GPU.PCIAddress)
	}
	return gpu.SortPCIAddresses(all)
}

func broken(pciAddress string, err error) gpu.Broken {
	return gpu.Broken{PCIAddress: pciAddress, Reason: err.Error(), Err: err}
}

func withBroken(node *gpu.Node, all ...gpu.Broken) *gpu.Node {
	node.Broken = all
	return node
}

func lost(pciAddress string) device.Status {
	return device.Status{Conditions: []device.Condition{{PCIAddress: pciAddress, Reason: device.Lost, Message: "gone"}}}
}

// TestWhenToDiscover: seldom while all is well, and at each poll while a GPU fails, and once more.
func TestWhenToDiscover(t *testing.T) {
	t.Parallel()
	well := testNodeWith(firstGPU, secondGPU)
	for name, test := range map[string]struct {
		node *gpu.Node
		err  error
		// surveys are what is seen before each of the discoveries after the first.
		surveys []device.Status
		want    []int
	}{
		"all is well":        {node: well, surveys: make([]device.Status, 3), want: []int{6, 6, 6}},
		"one is broken":      {node: withBroken(testNodeWith(firstGPU), broken(secondGPU, gpu.ErrLost)), surveys: make([]device.Status, 3), want: []int{1, 1, 1}},
		"lost and returned":  {node: well, surveys: []device.Status{{}, lost(firstGPU), lost(firstGPU), {}, {}}, want: []int{6, 1, 1, 1, 6}},
		"occupied is normal": {node: well, surveys: []device.Status{{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Occupied}}}}, want: []int{6}},
		"no driver":          {err: gpu.ErrDriverNotLoaded, surveys: make([]device.Status, 3), want: []int{1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				known, discoveries := newKnown(t), discoverer{interval: time.Minute, last: time.Now()}
				discover := func() {
					if test.err != nil {
						known.fail(test.err)
						return
					}
					known.take(t.Context(), test.node)
				}
				discover()
				var got []int
				for _, status := range test.surveys {
					polls := 0
					for due := false; !due; polls++ {
						if discoveries.isDue(known.isTrouble(status)) {
							t.Error("twice in a moment")
						}
						time.Sleep(discoveries.interval)
						due = discoveries.isDue(known.isTrouble(status))
					}
					got = append(got, polls)
					discover()
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("polls between discoveries (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestDiscoverAfterDropped: a GPU against which the last discovery's word was dropped is discovered again soon: a survey may not see what is
// wrong with it.
func TestDiscoverAfterDropped(t *testing.T) {
	t.Parallel()
	known := newKnown(t)
	known.take(t.Context(), testNodeWith(firstGPU, secondGPU))
	known.compare(lost(secondGPU), device.Status{})
	known.take(t.Context(), withBroken(testNodeWith(firstGPU), broken(secondGPU, gpu.ErrLost)))
	if got := known.conditions(); len(got) > 0 {
		t.Errorf("a survey has found it to work since the discovery began: %+v", got)
	}
	if !known.isTrouble(device.Status{}) {
		t.Error("the next discovery is as far away as if nothing were wrong")
	}
}

func TestDriverGoneAndBack(t *testing.T) {
	t.Parallel()
	known := newKnown(t)
	known.take(t.Context(), testNodeWith(firstGPU, secondGPU))
	gone := fmt.Errorf("open: %w", gpu.ErrDriverNotLoaded)
	known.fail(gone)
	want := []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: gone.Error()},
		{PCIAddress: secondGPU, Reason: device.Unresponsive, Message: gone.Error()},
	}
	if diff := cmp.Diff(want, known.conditions()); diff != "" {
		t.Errorf("conditions without a driver (-want +got):\n%s", diff)
	}
	known.take(t.Context(), testNodeWith(firstGPU, secondGPU))
	if got := known.conditions(); len(got) > 0 {
		t.Errorf("conditions with the driver: %+v", got)
	}
}

// TestOtherFailuresChangeNothing: a discovery that fails without saying that the
// driver is gone blames no GPU.
func TestOtherFailuresChangeNothing(t *testing.T) {
	t.Parallel()
	for _, err := range []error{&gpu.PendingError{Call: "nvmlDeviceGetCount_v2"}, errors.New("odd")} {
		known := newKnown(t)
		known.take(t.Context(), testNodeWith(firstGPU))
		known.fail(err)
		if known.driverGone != nil || len(known.conditions()) > 0 || len(known.node.GPUs) != 1 {
			t.Errorf("after %v: gone %v, conditions %+v", err, known.driverGone, known.conditions())
		}
	}
}

func TestAbsentGPUsAreKept(t *testing.T) {
	t.Parallel()
	const thirdGPU = "0000:3d:00.0"
	known := newKnown(t)
	known.take(t.Context(), withBroken(testNodeWith(firstGPU, secondGPU), broken(thirdGPU, gpu.ErrResetRequired)))
	if diff := cmp.Diff([]string{firstGPU, secondGPU}, addresses(known.node)); diff != "" {
		t.Errorf("GPUs at first (-want +got):\n%s", diff)
	}
	known.take(t.Context(), withBroken(testNodeWith(thirdGPU), broken(firstGPU, gpu.ErrUnknown), broken("", gpu.ErrLost)))
	if diff := cmp.Diff([]string{firstGPU, secondGPU, thirdGPU}, addresses(known.node)); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	want := []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: gpu.ErrUnknown.Error()},
		{PCIAddress: secondGPU, Reason: device.Lost, Message: gpu.ErrLost.Error()},
	}
	if diff := cmp.Diff(want, known.conditions()); diff != "" {
		t.Errorf("conditions (-want +got):\n%s", diff)
	}
}

// TestNamelessGPUs: a process that starts while GPUs are lost cannot read their
// addresses. If as many are missing as do not answer, these are the same.
func TestNamelessGPUs(t *testing.T) {
	t.Parallel()
	const thirdGPU = "0000:3d:00.0"
	for name, test := range map[string]struct {
		broken []gpu.Broken
		want   []device.Reason
	}{
		"as many":   {[]gpu.Broken{broken("", gpu.ErrHung), broken("", gpu.ErrResetRequired)}, []device.Reason{device.Unresponsive, device.ResetRequired}},
		"fewer":     {[]gpu.Broken{broken("", gpu.ErrHung)}, []device.Reason{device.Lost, device.Lost}},
		"one known": {[]gpu.Broken{broken("", gpu.ErrHung), broken(thirdGPU, gpu.ErrResetRequired)}, []device.Reason{device.ResetRequired, device.Unresponsive}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := newKnown(t)
			known.node = testNodeWith(firstGPU, secondGPU, thirdGPU)
			known.take(t.Context(), withBroken(testNodeWith(firstGPU), test.broken...))
			var got []device.Reason
			for _, c := range known.conditions() {
				got = append(got, c.Reason)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
			if got := addresses(known.node); len(got) != 3 {
				t.Errorf("published are %v", got)
			}
		})
	}
}
