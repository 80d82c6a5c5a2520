// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// find applies the discovery of these GPUs.
func find(t *testing.T, s *nodeState, node *gpu.Node) {
	t.Helper()
	known, _ := s.merge(node)
	s.applyDiscovery(node, inventoryOf(t, known))
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

// pollsUntilDiscovery counts the polls until the next discovery.
func pollsUntilDiscovery(s *nodeState) int {
	for n := 1; ; n++ {
		if s.countPoll() {
			return n
		}
	}
}

func lost(pciAddress string) device.Status {
	return device.Status{Conditions: []device.Condition{{PCIAddress: pciAddress, Reason: device.Lost, Message: "gone"}}}
}

// TestWhenToDiscover: seldom while all is well, at once when a GPU fails or
// returns, and more and more rarely while it stays away.
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
		"one is broken":      {node: withBroken(testNodeWith(firstGPU), broken(secondGPU, gpu.ErrLost)), surveys: make([]device.Status, 5), want: []int{1, 2, 4, 6, 6}},
		"one is lost":        {node: well, surveys: []device.Status{{}, lost(firstGPU), lost(firstGPU), lost(firstGPU)}, want: []int{6, 1, 1, 2}},
		"lost and returned":  {node: well, surveys: []device.Status{{}, lost(firstGPU), lost(firstGPU), {}, {}}, want: []int{6, 1, 1, 1, 6}},
		"another one":        {node: well, surveys: []device.Status{lost(firstGPU), lost(firstGPU), lost(firstGPU), lost(secondGPU)}, want: []int{1, 1, 2, 1}},
		"occupied is normal": {node: well, surveys: []device.Status{{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Occupied}}}}, want: []int{6}},
		"no driver":          {err: gpu.ErrDriverNotLoaded, surveys: make([]device.Status, 3), want: []int{1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var state nodeState
			discover := func() {
				if test.err != nil {
					state.discoveryFailed(test.err)
					return
				}
				find(t, &state, test.node)
			}
			discover()
			var got []int
			for _, status := range test.surveys {
				state.applySurvey(status)
				got = append(got, pollsUntilDiscovery(&state))
				discover()
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("polls between discoveries (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDriverGoneAndBack(t *testing.T) {
	t.Parallel()
	var state nodeState
	find(t, &state, testNodeWith(firstGPU, secondGPU))
	gone := fmt.Errorf("open: %w", gpu.ErrDriverNotLoaded)
	state.applySurvey(device.Status{Conditions: []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: "a call failed"},
	}})
	state.discoveryFailed(gone)
	want := []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: gone.Error()},
		{PCIAddress: secondGPU, Reason: device.Unresponsive, Message: gone.Error()},
	}
	if diff := cmp.Diff(want, state.status(nil, &policy.Health{}).Conditions); diff != "" {
		t.Errorf("conditions without a driver (-want +got):\n%s", diff)
	}
	if got := pollsUntilDiscovery(&state); got != 1 {
		t.Errorf("the driver is looked for after %d polls", got)
	}
	find(t, &state, testNodeWith(firstGPU, secondGPU))
	state.applySurvey(device.Status{})
	if got := state.status(nil, &policy.Health{}).Conditions; len(got) > 0 {
		t.Errorf("conditions with the driver: %+v", got)
	}
}

// TestOtherFailuresChangeNothing: a discovery that fails without saying that the
// driver is gone blames no GPU.
func TestOtherFailuresChangeNothing(t *testing.T) {
	t.Parallel()
	for _, err := range []error{&gpu.PendingError{Call: "nvmlDeviceGetCount_v2"}, errors.New("odd")} {
		var state nodeState
		find(t, &state, testNodeWith(firstGPU))
		state.discoveryFailed(err)
		if state.driverGone != nil || len(state.status(nil, &policy.Health{}).Conditions) > 0 || len(pciAddresses(state.inventory)) != 1 {
			t.Errorf("after %v: gone %v, conditions %+v", err, state.driverGone, state.status(nil, &policy.Health{}).Conditions)
		}
		if got := pollsUntilDiscovery(&state); got != 1 {
			t.Errorf("after %v: %d polls until the next try", err, got)
		}
	}
}

func TestAbsentGPUsAreKept(t *testing.T) {
	t.Parallel()
	const thirdGPU = "0000:3d:00.0"
	var state nodeState
	find(t, &state, withBroken(testNodeWith(firstGPU, secondGPU), broken(thirdGPU, gpu.ErrResetRequired)))
	if diff := cmp.Diff([]string{firstGPU, secondGPU}, pciAddresses(state.inventory)); diff != "" {
		t.Errorf("GPUs at first (-want +got):\n%s", diff)
	}
	find(t, &state, withBroken(testNodeWith(thirdGPU), broken(firstGPU, gpu.ErrUnknown), broken("", gpu.ErrLost)))
	if diff := cmp.Diff([]string{firstGPU, secondGPU, thirdGPU}, pciAddresses(state.inventory)); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	want := []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: gpu.ErrUnknown.Error()},
		{PCIAddress: secondGPU, Reason: device.Lost, Message: gpu.ErrLost.Error()},
	}
	if diff := cmp.Diff(want, state.status(nil, &policy.Health{}).Conditions); diff != "" {
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
			var state nodeState
			all := testNodeWith(firstGPU, secondGPU, thirdGPU)
			state.recall(all, nil, inventoryOf(t, all))
			find(t, &state, withBroken(testNodeWith(firstGPU), test.broken...))
			var got []device.Reason
			for _, c := range state.status(nil, &policy.Health{}).Conditions {
				got = append(got, c.Reason)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
			if got := pciAddresses(state.inventory); len(got) != 3 {
				t.Errorf("published are %v", got)
			}
		})
	}
}
