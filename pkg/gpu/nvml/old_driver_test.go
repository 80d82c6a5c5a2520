// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	fatal "github.com/partage-dev/partage/test/must"
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
	expect.Same(t, fatal.Get(c.Health(t.Context(), pci))(t), gpu.Health{}, "health")
}

// lacking is a library without some functions.
type lacking struct {
	nvml.Interface
	names []string
}

func (l lacking) Extensions() nvml.ExtendedInterface { return l }

func (l lacking) LookupSymbol(name string) error {
	if slices.Contains(l.names, name) {
		return errors.New("no such symbol")
	}
	return nil
}

// Functions with a newer name are called by their old one where there is no other.
func TestSimulatedHealthByOldNames(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.GPUs[0].Health.ClocksReasons = 0x20
	c, file := simulateClosed(t, m, Options{})
	load := c.load
	c.load = func(path string) nvml.Interface {
		return lacking{load(path), []string{"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV"}}
	}
	fatal.Do(t, c.Open(t.Context()))
	want := well()
	want.Throttling = []gpu.Throttling{gpu.ThrottlingSoftwareThermal}
	expect.Same(t, fatal.Get(c.Health(t.Context(), m.GPUs[0].PCIAddress))(t), want, "health")
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
	// Newer than R525, but the last.
	missing := "nvmlDeviceGetAddressingMode nvmlDeviceGetRepairStatus " +
		"nvmlDeviceGetUnrepairableMemoryFlag_v1 nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetCurrentClocksEventReasons " +
		"nvmlDeviceGetTemperatureV nvmlDeviceGetNvLinkRemoteDeviceType"
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
	c, _ := simulate(t, m)
	pci := m.GPUs[0].PCIAddress
	node, err := c.Discover(t.Context())
	if err != nil || len(node.GPUs) != 1 || node.GPUs[0].AddressingMode != "" || len(node.GPUs[0].MIG.Profiles) == 0 {
		t.Errorf("%+v, %v", node, err)
	}
	want := well()
	want.RecoveryAction, want.Throttling = "", []gpu.Throttling{gpu.ThrottlingSoftwareThermal}
	expect.Same(t, fatal.Get(c.Health(t.Context(), pci))(t), want, "health")
}
