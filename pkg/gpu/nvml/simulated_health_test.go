// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

// well is what a GPU in good health reports.
func well() gpu.Health {
	return gpu.Health{
		RecoveryAction: gpu.RecoveryNone, UncorrectedECC: new(uint64), Temperature: pointer(34),
	}
}

func pointer[T any](value T) *T { return &value }

func TestSimulatedHealth(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*machine.GPU)
		want   func(*gpu.Health)
	}{
		"well": {func(*machine.GPU) {}, func(*gpu.Health) {}},
		"memory errors since the reset": {
			func(g *machine.GPU) {
				g.Health.VolatileECC = machine.ECCErrors{Corrected: 7, Uncorrected: 2}
				g.Health.AggregateECC = machine.ECCErrors{Corrected: 100, Uncorrected: 50}
			},
			func(h *gpu.Health) { h.UncorrectedECC = pointer(uint64(2)) },
		},
		"without ECC": {
			func(g *machine.GPU) { g.ECC = -1 },
			func(h *gpu.Health) { h.UncorrectedECC = nil },
		},
		"before Ampere": {
			func(g *machine.GPU) {
				g.Architecture = nvml.DEVICE_ARCH_TURING
				g.Health.Unrepairable, g.Health.ChannelRepair = true, true
			},
			func(*gpu.Health) {},
		},
		"remapped rows": {
			func(g *machine.GPU) {
				g.Health.RemappedRows = machine.RemappedRows{Corrected: 1, Uncorrected: 2, Pending: true, Failed: true}
			},
			func(h *gpu.Health) { h.RepairPending, h.RowRemapFailed = true, true },
		},
		"no rows are told with partitions": {
			func(g *machine.GPU) {
				g.MIG.Current, g.MIG.Pending = true, true
				g.MIG.Instances = []machine.GPUInstance{{ID: 9, ProfileID: 19, Placement: machine.Placement{Size: 1}}}
			},
			func(*gpu.Health) {},
		},
		"channel repair":      {func(g *machine.GPU) { g.Health.ChannelRepair = true }, func(h *gpu.Health) { h.RepairPending = true }},
		"TPC repair":          {func(g *machine.GPU) { g.Health.TPCRepair = true }, func(h *gpu.Health) { h.RepairPending = true }},
		"unrepairable memory": {func(g *machine.GPU) { g.Health.Unrepairable = true }, func(h *gpu.Health) { h.Unrepairable = true }},
		"drain and reset": {
			func(g *machine.GPU) { g.Health.RecoveryAction = int(nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET) },
			func(h *gpu.Health) { h.RecoveryAction = "Drain and Reset" },
		},
		"an action of a newer driver": {
			func(g *machine.GPU) { g.Health.RecoveryAction = 42 },
			func(h *gpu.Health) { h.RecoveryAction = "Recovery action 42" },
		},
		"heat": {
			func(g *machine.GPU) {
				g.Health.Temperature = 92
				g.Health.ClocksReasons = nvml.ClocksThrottleReasonHwSlowdown | nvml.ClocksThrottleReasonHwThermalSlowdown | nvml.ClocksEventReasonSwThermalSlowdown
			},
			func(h *gpu.Health) {
				h.Temperature = pointer(92)
				h.Throttling = []gpu.Throttling{gpu.ThrottlingHardwareThermal, gpu.ThrottlingSoftwareThermal}
			},
		},
		"power brake": {
			func(g *machine.GPU) { g.Health.ClocksReasons = nvml.ClocksThrottleReasonHwPowerBrakeSlowdown },
			func(h *gpu.Health) { h.Throttling = []gpu.Throttling{gpu.ThrottlingPowerBrake} },
		},
		"low clocks that are normal": {
			func(g *machine.GPU) {
				g.Health.ClocksReasons = nvml.ClocksEventReasonSwPowerCap | nvml.ClocksEventReasonApplicationsClocksSetting | nvml.ClocksEventReasonSyncBoost
			},
			func(*gpu.Health) {},
		},
		"healthy fabric": {
			func(g *machine.GPU) {
				g.Health.Fabric = machine.Fabric{
					State: nvml.GPU_FABRIC_STATE_COMPLETED,
					Mask: nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE |
						nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_FALSE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY |
						nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION,
				}
			},
			func(*gpu.Health) {},
		},
		"fabric that is being joined": {
			func(g *machine.GPU) {
				g.Health.Fabric = machine.Fabric{State: nvml.GPU_FABRIC_STATE_IN_PROGRESS, Status: int(nvml.ERROR_UNKNOWN)}
			},
			func(h *gpu.Health) { h.FabricPending = "In Progress" },
		},
		"unhealthy fabric": {
			func(g *machine.GPU) {
				g.Health.Fabric = machine.Fabric{
					State: nvml.GPU_FABRIC_STATE_COMPLETED, Status: int(nvml.ERROR_TIMEOUT),
					Mask: nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE |
						nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY |
						nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NO_PARTITION<<nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION,
				}
			},
			func(h *gpu.Health) {
				h.FabricUnhealthy = "registration failed: Timeout (NVML code 10), bandwidth is degraded, a route is unhealthy, " +
					"the configuration is incorrect (NVML's reason 4)"
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx1")
			test.change(&m.GPUs[0])
			c, file := simulate(t, m)
			want := well()
			test.want(&want)
			expect.Same(t, fatal.Get(c.Health(t.Context(), m.GPUs[0].PCIAddress))(t), want, "health")
			expect.Len(t, fatal.Get(file.Unmodelled())(t), 0, "not simulated")
		})
	}
}

// A driver that is older than the recovery action has all the rest.
func TestSimulatedHealthOfOldDriver(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.DriverVersion = "550.54.15"
	c, _ := simulate(t, m)
	want := well()
	want.RecoveryAction = ""
	expect.Same(t, fatal.Get(c.Health(t.Context(), m.GPUs[0].PCIAddress))(t), want, "health")
}

// What cannot be read is missing, and the rest is there; only a GPU that hangs is not
// asked for more.
func TestSimulatedHealthFaults(t *testing.T) {
	for function, want := range map[string]func(*gpu.Health){
		"nvmlDeviceGetFieldValues":               func(h *gpu.Health) { h.RecoveryAction = "" },
		"nvmlDeviceGetRemappedRows":              func(*gpu.Health) {},
		"nvmlDeviceGetTotalEccErrors":            func(h *gpu.Health) { h.UncorrectedECC = nil },
		"nvmlDeviceGetRepairStatus":              func(*gpu.Health) {},
		"nvmlDeviceGetUnrepairableMemoryFlag_v1": func(*gpu.Health) {},
		"nvmlDeviceGetGpuFabricInfoV":            func(*gpu.Health) {},
		"nvmlDeviceGetCurrentClocksEventReasons": func(*gpu.Health) {},
		"nvmlDeviceGetTemperatureV":              func(h *gpu.Health) { h.Temperature = nil },
	} {
		t.Run(function, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx1")
			state.AddFault(m, machine.Fault{Function: function, Code: int(nvml.ERROR_UNKNOWN)})
			c, _ := simulate(t, m)
			expected := well()
			want(&expected)
			got, err := c.Health(t.Context(), m.GPUs[0].PCIAddress)
			var failed *gpu.Error
			if !errors.As(err, &failed) || failed.Call != function || !errors.Is(err, gpu.ErrUnknown) {
				t.Errorf("error %v, want that of %s", err, function)
			}
			expect.Same(t, got, expected, "health")
		})
	}
}

func TestSimulatedHealthOfLostGPU(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.GPUs[0].Failure = int(nvml.ERROR_GPU_IS_LOST)
	c, _ := simulate(t, m)
	if got, err := c.Health(t.Context(), m.GPUs[0].PCIAddress); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("%+v, %v", got, err)
	}
}

// A handle from before a reset is replaced.
func TestSimulatedHealthAfterReset(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.GPUs[0].Health.VolatileECC.Uncorrected, m.GPUs[0].Health.RemappedRows = 1, machine.RemappedRows{Uncorrected: 1, Pending: true}
	c, file := simulate(t, m)
	pci := m.GPUs[0].PCIAddress
	before, err := c.Health(t.Context(), pci)
	if err != nil || *before.UncorrectedECC != 1 || !before.RepairPending {
		t.Fatalf("%+v, %v", before, err)
	}
	fatal.Do(t, file.Update(func(m *machine.Machine) error { return m.ResetGPU(0) }))
	expect.Same(t, fatal.Get(c.Health(t.Context(), pci))(t), well(), "health")
}

func TestSimulatedHealthHang(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx2")
	c, file := simulate(t, m)
	addFault(t, file, machine.Fault{Function: "nvmlDeviceGetRemappedRows", GPU: 0, Hang: true, Effect: machine.Proceed})
	restore := impatient(c, 2*time.Second)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := c.Health(ctx, m.GPUs[0].PCIAddress)
	hung := expectHung(t, err, "nvmlDeviceGetRemappedRows", m.GPUs[0].PCIAddress)
	if got.RecoveryAction != gpu.RecoveryNone || got.Temperature != nil {
		t.Errorf("what was read before is missing, or the GPU was asked on: %+v", got)
	}
	restore()
	expect.Do(t, expect.Err(c.Health(ctx, m.GPUs[1].PCIAddress)), "other GPU")
	update(t, file, func(m *machine.Machine) { m.Faults = nil })
	<-hung.Done
}
