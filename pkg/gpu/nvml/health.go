// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Health reads what a GPU says about its own state. What the GPU or its driver does not
// support is nil or empty. It makes up to 12 calls of the library.
//
// A value that cannot be read for another reason is empty, too, and the error says why; the
// others are there all the same. Only a GPU that does not answer is not asked for the rest.
func (c *Client) Health(ctx context.Context, pciAddress string) (gpu.Health, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (health gpu.Health) {
		var errs []error
		for _, read := range []func(*reading, *gpu.Health){
			readRecoveryAction, readRemappedRows, readECC, readRepairs,
			readFabric, readThrottling, readTemperature,
		} {
			read(r, &health)
			errs = append(errs, r.err)
			if r.over() {
				break
			}
			r.err = nil
		}
		r.err = errors.Join(errs...)
		return health
	})
}

// recoveryActions are named as nvidia-smi -q does, the last three, which are newer, as nvml.h does. A driver may know more.
var recoveryActions = map[nvml.DeviceGpuRecoveryAction]gpu.RecoveryAction{
	nvml.GPU_RECOVERY_ACTION_NONE:                gpu.RecoveryNone,
	nvml.GPU_RECOVERY_ACTION_GPU_RESET:           gpu.RecoveryReset,
	nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:         "Reboot",
	nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:           "Drain P2P",
	nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:     "Drain and Reset",
	nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "Recover IMEX Domain",
	nvml.GPU_RECOVERY_ACTION_BUS_RESET:           "Bus Reset",
	nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:       "System Reboot",
}

// readFields reads fields of the GPU, all or none. A driver that does not know one says so in the field's own code.
func readFields(r *reading, fields ...nvml.FieldValue) (values []nvml.FieldValue, known bool) {
	return ask(r, "nvmlDeviceGetFieldValues", func() ([]nvml.FieldValue, nvml.Return) {
		ret := r.dev.GetFieldValues(fields)
		for i := range fields {
			if ret == nvml.SUCCESS {
				ret = nvml.Return(fields[i].NvmlReturn)
			}
		}
		return fields, ret
	})
}

// readRecoveryAction reads the field that nvidia-smi -q shows as "GPU Recovery Action".
func readRecoveryAction(r *reading, health *gpu.Health) {
	fields, known := readFields(r, nvml.FieldValue{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION})
	if errors.Is(r.err, gpu.ErrInvalid) { // so a driver calls a field that is newer
		r.err = nil
	}
	if !known {
		return
	}
	// Of whatever width the number is, its lowest bytes come first.
	number := nvml.DeviceGpuRecoveryAction(binary.LittleEndian.Uint16(fields[0].Value[:]))
	action, known := recoveryActions[number]
	if !known {
		action = gpu.RecoveryAction(fmt.Sprintf("Recovery action %d", number))
	}
	health.RecoveryAction = action
}

func readRemappedRows(r *reading, health *gpu.Health) {
	rows, known := ask(r, "nvmlDeviceGetRemappedRows", func() (rows struct{ Pending, Failed bool }, ret nvml.Return) {
		_, _, rows.Pending, rows.Failed, ret = r.dev.GetRemappedRows()
		return rows, ret
	})
	health.RepairPending, health.RowRemapFailed = rows.Pending, rows.Failed
	if !known { // GPUs that retire pages instead
		pages, _ := ask(r, "nvmlDeviceGetRetiredPagesPendingStatus", r.dev.GetRetiredPagesPendingStatus)
		health.RepairPending = pages == nvml.FEATURE_ENABLED
	}
}

func readECC(r *reading, health *gpu.Health) {
	health.UncorrectedECC = known(r, "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
		return r.dev.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	})
}

// readRepairs reads what is to be repaired, and what cannot be.
func readRepairs(r *reading, health *gpu.Health) {
	repair, _ := ask(r, "nvmlDeviceGetRepairStatus", r.dev.GetRepairStatus)
	health.RepairPending = health.RepairPending || repair.BChannelRepairPending != 0 || repair.BTpcRepairPending != 0
	memory, _ := ask(r, "nvmlDeviceGetUnrepairableMemoryFlag_v1", r.dev.GetUnrepairableMemoryFlag_v1)
	health.Unrepairable = memory.BUnrepairableMemory != 0
}

// fabricHealth describes the values of fields of the fabric's health mask, by field.
var fabricHealth = []struct {
	shift, width, bad uint32
	text              string
}{
	{nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW, nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE, "bandwidth is degraded"},
	{nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_RECOVERY, nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_TRUE, "routes are being recovered"},
	{nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY, nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE, "a route is unhealthy"},
	{nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_ACCESS_TIMEOUT_RECOVERY, nvml.GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_TRUE, "access timeouts are being recovered"},
}

// readFabric reads the state of the GPU's registration with the NVLink fabric.
func readFabric(r *reading, health *gpu.Health) {
	info, known := readFabricInfo(r)
	if pending := fabricPendings[info.State]; known && pending != "" {
		if mode, _ := ask(r, "nvmlDeviceGetMigMode", r.getMIGMode); !mode.current && r.err == nil {
			health.FabricPending = pending
		}
	}
	if !known || info.State != nvml.GPU_FABRIC_STATE_COMPLETED {
		return
	}
	var wrong []string
	if ret := nvml.Return(info.Status); ret != nvml.SUCCESS {
		wrong = append(wrong, "registration failed: "+describe(ret))
	}
	for _, field := range fabricHealth {
		if info.HealthMask>>field.shift&field.width == field.bad {
			wrong = append(wrong, field.text)
		}
	}
	const configuration = nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
	if value := info.HealthMask >> configuration & nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION; value > nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE {
		wrong = append(wrong, fmt.Sprintf("the configuration is incorrect (NVML's reason %d)", value))
	}
	health.FabricUnhealthy = strings.Join(wrong, ", ")
}

// fabricPendings are the states in which CUDA does not start.
var fabricPendings = map[uint8]string{
	nvml.GPU_FABRIC_STATE_NOT_STARTED: "Not Started",
	nvml.GPU_FABRIC_STATE_IN_PROGRESS: "In Progress",
}

// throttlings are the reasons that mean that something is wrong. Others are normal, such as
// an idle GPU or the limit of power that is set.
var throttlings = []struct {
	bit    uint64
	reason gpu.Throttling
}{
	{nvml.ClocksThrottleReasonHwThermalSlowdown, gpu.ThrottlingHardwareThermal},
	{nvml.ClocksEventReasonSwThermalSlowdown, gpu.ThrottlingSoftwareThermal},
	{nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, gpu.ThrottlingPowerBrake},
}

// readThrottling reads by the function's new name, or by its old one, which is deprecated.
func readThrottling(r *reading, health *gpu.Health) {
	reasons, known := ask(r, "nvmlDeviceGetCurrentClocksEventReasons", r.dev.GetCurrentClocksEventReasons)
	if !known {
		reasons, _ = ask(r, "nvmlDeviceGetCurrentClocksThrottleReasons", r.dev.GetCurrentClocksThrottleReasons)
	}
	for _, t := range throttlings {
		if reasons&t.bit != 0 {
			health.Throttling = append(health.Throttling, t.reason)
		}
	}
}

// readTemperature reads that of the GPU's chip, by the newer function that replaces a deprecated
// one, or by that.
func readTemperature(r *reading, health *gpu.Health) {
	health.Temperature = known(r, "nvmlDeviceGetTemperatureV", func() (int, nvml.Return) {
		found, ret := r.dev.GetTemperatureV().V1()
		return int(found.Temperature), ret
	})
	if health.Temperature == nil {
		health.Temperature = known(r, "nvmlDeviceGetTemperature", func() (int, nvml.Return) {
			found, ret := r.dev.GetTemperature(nvml.TEMPERATURE_GPU)
			return int(found), ret
		})
	}
}

// FabricPending returns how far the GPU's registration with the NVLink fabric is, as
// gpu.Health.FabricPending has it, but in any MIG mode.
func (c *Client) FabricPending(ctx context.Context, pciAddress string) (state string, err error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) string {
		info, _ := readFabricInfo(r)
		return fabricPendings[info.State]
	})
}
