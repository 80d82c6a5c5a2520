// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/gpu"
)

// healthFunctions are all that Health calls.
var healthFunctions = []string{
	"nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRepairStatus",
	"nvmlDeviceGetUnrepairableMemoryFlag_v1", "nvmlDeviceGetGpuFabricInfoV",
	"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
	"nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature",
}

// A library that lacks functions loses what they say, and is good for the rest. Calling one
// that is missing panics here, and would end the process on a machine.
func TestHealthOfOldLibrary(t *testing.T) {
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{{busID: busID}}, missing: healthFunctions})
	got, err := c.Health(t.Context(), pci)
	if diff := cmp.Diff(gpu.Health{}, got); diff != "" || err != nil {
		t.Errorf("%v, health (-want +got):\n%s", err, diff)
	}
}

// Functions with a newer name are called by their old one where there is no other.
func TestSimulatedHealthByOldNames(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.GPUs[0].Health.ClocksReasons = 0x20
	c, file := simulate(t, m)
	h, _, err := c.handle(t.Context(), m.GPUs[0].PCIAddress)
	if err != nil {
		t.Fatal(err)
	}
	old := asker{has: func(function string) bool {
		return !slices.Contains([]string{"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV"}, function)
	}}
	var health gpu.Health
	if err := errors.Join(old.throttling(t.Context(), h, &health), old.temperature(t.Context(), h, &health)); err != nil {
		t.Fatal(err)
	}
	want := gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingSoftwareThermal}, Temperature: pointer(34)}
	if diff := cmp.Diff(want, health); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
	calls, err := file.Calls()
	if err != nil || calls["nvmlDeviceGetTemperature"] != 1 || calls["nvmlDeviceGetTemperatureV"] != 0 {
		t.Errorf("calls: %v, %v", calls, err)
	}
}

// A process that calls a function that its library lacks is ended by the dynamic linker.
// With the library of an old driver none is, and all but what it cannot say is there.
func TestSimulatedOldDriver(t *testing.T) {
	if os.Getenv(oldDriver) != "" {
		useOldDriver(t)
		return
	}
	// Newer than R525, but the last, without which there are no events.
	missing := "nvmlDeviceGetAddressingMode nvmlDeviceGetGpuInstanceProfileInfoV nvmlDeviceGetRepairStatus " +
		"nvmlDeviceGetUnrepairableMemoryFlag_v1 nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetCurrentClocksEventReasons " +
		"nvmlDeviceGetTemperatureV nvmlEventSetWait_v2 nvmlDeviceGetNvLinkRemoteDeviceType"
	old := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSimulatedOldDriver$", "-test.v")
	old.Env = append(os.Environ(), oldDriver+"="+missing)
	if out, err := old.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Fatalf("%v\n%s", err, out)
	}
}

func useOldDriver(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.DriverVersion = "525.60.13"
	m.GPUs[0].Health.ClocksReasons = 0x20
	l := listen(t, m, Options{})
	pci := m.GPUs[0].PCIAddress
	node, err := l.client.Discover(t.Context())
	if err != nil || len(node.GPUs) != 1 || node.GPUs[0].AddressingMode != "" || len(node.GPUs[0].MIG.Profiles) == 0 {
		t.Errorf("%+v, %v", node, err)
	}
	want := well()
	want.RecoveryAction, want.Throttling = "", []gpu.Throttling{gpu.ThrottlingSoftwareThermal}
	health, err := l.client.Health(t.Context(), pci)
	if diff := cmp.Diff(want, health); diff != "" || err != nil {
		t.Errorf("%v, health (-want +got):\n%s", err, diff)
	}
	l.until(pci, "without events", func(err error) bool { return errors.Is(err, gpu.ErrNotSupported) })
}

func TestEventsOfOldLibrary(t *testing.T) {
	for _, missing := range eventFunctions {
		t.Run(missing, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := openFake(t, &fakeLibrary{devices: []*fakeDevice{{busID: busID}}, missing: []string{missing}})
				_, ctx := ktesting.NewTestContext(t) // the log is the test's
				ctx, stop := context.WithCancel(ctx)
				if _, err := c.Discover(ctx); err != nil {
					t.Fatal(err)
				}
				if err := c.Unmonitored(pci); err != nil {
					t.Errorf("before it is known: %v", err)
				}
				events := c.Events(ctx)
				synctest.Wait()
				if err := c.Unmonitored(pci); !errors.Is(err, gpu.ErrNotSupported) || !strings.Contains(err.Error(), missing) {
					t.Errorf("error %v, want one about %s", err, missing)
				}
				stop()
				for e := range events { // until it is closed
					t.Errorf("event %+v", e)
				}
			})
		})
	}
}
