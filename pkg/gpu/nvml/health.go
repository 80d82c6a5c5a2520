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
// support is nil or empty. It makes up to 11 calls of the library.
//
// A value that cannot be read for another reason is empty, too, and the error says why; the
// others are there all the same. Only a GPU that does not answer is not asked for the rest.
func (c *Client) Health(ctx context.Context, pciAddress string) (gpu.Health, error) {
	lib, err := c.library()
	if err != nil {
		return gpu.Health{}, err
	}
	r := newAsker(lib)
	var health gpu.Health
	err = c.onGPU(ctx, pciAddress, func(h *handle) error {
		health = gpu.Health{}
		var errs []error
		for _, read := range []func(context.Context, *handle, *gpu.Health) error{
			r.recoveryAction, r.remappedRows, r.retiredPages, r.ecc, r.repairs, r.fabric, r.throttling, r.temperature,
		} {
			_, err := optional(struct{}{}, read(ctx, h, &health))
			errs = append(errs, err)
			if gpu.IsPending(err) || ctx.Err() != nil {
				break
			}
		}
		return errors.Join(errs...)
	})
	return health, err
}

// asker asks for what the library may not have. It fails with gpu.ErrNotSupported for what there is not.
type asker struct {
	has func(function string) bool // whether the library does
}

func newAsker(lib nvml.Interface) asker {
	return asker{func(function string) bool { return lib.Extensions().LookupSymbol(function) == nil }}
}

// ask is get for a function that the library may lack.
func ask[T any](ctx context.Context, r asker, h *handle, call string, f func() (T, nvml.Return)) (T, error) {
	if r.has(call) {
		return get(ctx, h.queue, call, f)
	}
	var none T
	return none, failure(call, h.pci, nvml.ERROR_FUNCTION_NOT_FOUND)
}

var recoveryActions = map[nvml.DeviceGpuRecoveryAction]gpu.RecoveryAction{
	nvml.GPU_RECOVERY_ACTION_NONE:                gpu.RecoveryNone,
	nvml.GPU_RECOVERY_ACTION_GPU_RESET:           gpu.RecoveryReset,
	nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:         gpu.RecoveryReboot,
	nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:           gpu.RecoveryDrainP2P,
	nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:     gpu.RecoveryDrainAndReset,
	nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: gpu.RecoveryIMEXDomain,
	nvml.GPU_RECOVERY_ACTION_BUS_RESET:           gpu.RecoveryBusReset,
	nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:       gpu.RecoverySystemReboot,
}

// recoveryAction reads the field that nvidia-smi -q shows as "GPU Recovery Action". A driver
// that does not know the field says so in the field's own code.
func (r asker) recoveryAction(ctx context.Context, h *handle, health *gpu.Health) error {
	field, err := ask(ctx, r, h, "nvmlDeviceGetFieldValues", func() (nvml.FieldValue, nvml.Return) {
		fields := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		ret := h.dev.GetFieldValues(fields)
		if ret == nvml.SUCCESS {
			ret = nvml.Return(fields[0].NvmlReturn)
		}
		return fields[0], ret
	})
	// A driver that is older than the field calls it an invalid argument.
	if errors.Is(err, gpu.ErrInvalid) {
		return nil
	}
	if err != nil {
		return err
	}
	number := nvml.DeviceGpuRecoveryAction(unsigned(field))
	action, known := recoveryActions[number]
	if !known {
		action = gpu.RecoveryAction(fmt.Sprintf("Recovery action %d", number))
	}
	health.RecoveryAction = action
	return nil
}

// unsigned is the value of a field that is a natural number.
func unsigned(field nvml.FieldValue) uint64 {
	switch nvml.ValueType(field.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.NativeEndian.Uint16(field.Value[:]))
	case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
		return uint64(binary.NativeEndian.Uint32(field.Value[:]))
	default:
		return binary.NativeEndian.Uint64(field.Value[:])
	}
}

func (r asker) remappedRows(ctx context.Context, h *handle, health *gpu.Health) error {
	rows, err := ask(ctx, r, h, "nvmlDeviceGetRemappedRows", func() (gpu.RemappedRows, nvml.Return) {
		corrected, uncorrected, pending, failed, ret := h.dev.GetRemappedRows()
		return gpu.RemappedRows{Corrected: corrected, Uncorrected: uncorrected, Pending: pending, Failed: failed}, ret
	})
	if err == nil {
		health.RemappedRows = &rows
	}
	return err
}

// retiredPages asks GPUs that do not remap rows.
func (r asker) retiredPages(ctx context.Context, h *handle, health *gpu.Health) error {
	if health.RemappedRows != nil {
		return nil
	}
	pending, err := ask(ctx, r, h, "nvmlDeviceGetRetiredPagesPendingStatus", h.dev.GetRetiredPagesPendingStatus)
	health.PageRetirementPending = err == nil && pending == nvml.FEATURE_ENABLED
	return err
}

func (r asker) ecc(ctx context.Context, h *handle, health *gpu.Health) error {
	read := func(kind nvml.MemoryErrorType) (*uint64, error) {
		return known(ask(ctx, r, h, "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
			return h.dev.GetTotalEccErrors(kind, nvml.VOLATILE_ECC)
		}))
	}
	var err error
	if health.UncorrectedECC, err = read(nvml.MEMORY_ERROR_TYPE_UNCORRECTED); err != nil {
		return err
	}
	health.CorrectedECC, err = read(nvml.MEMORY_ERROR_TYPE_CORRECTED)
	return err
}

// repairs reads what is to be repaired, and what cannot be.
func (r asker) repairs(ctx context.Context, h *handle, health *gpu.Health) error {
	repair, err := optional(ask(ctx, r, h, "nvmlDeviceGetRepairStatus", h.dev.GetRepairStatus))
	if err != nil {
		return err
	}
	health.RepairPending = repair.BChannelRepairPending != 0 || repair.BTpcRepairPending != 0
	memory, err := ask(ctx, r, h, "nvmlDeviceGetUnrepairableMemoryFlag_v1", h.dev.GetUnrepairableMemoryFlag_v1)
	health.Unrepairable = memory.BUnrepairableMemory != 0
	return err
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

// fabric reads the state of the GPU's registration with the NVLink fabric.
func (r asker) fabric(ctx context.Context, h *handle, health *gpu.Health) error {
	if !r.has("nvmlDeviceGetGpuFabricInfoV") {
		return nil
	}
	info, err := fabricInfo(ctx, h)
	if err != nil {
		return err
	}
	if info.State != nvml.GPU_FABRIC_STATE_COMPLETED {
		health.FabricPending, err = fabricPending(ctx, h, info)
		return err
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
	return nil
}

// fabricPendings are the states in which CUDA does not start.
var fabricPendings = map[uint8]string{
	nvml.GPU_FABRIC_STATE_NOT_STARTED: "Not Started",
	nvml.GPU_FABRIC_STATE_IN_PROGRESS: "In Progress",
}

// fabricPending is gpu.Health.FabricPending.
func fabricPending(ctx context.Context, h *handle, info nvml.GpuFabricInfo_v2) (string, error) {
	state := fabricPendings[info.State]
	if state == "" {
		return "", nil
	}
	mode, err := optional(h.migMode(ctx))
	if err != nil || mode.current {
		return "", err
	}
	return state, nil
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

// throttling reads by the function's new name, or by its old one, which is deprecated.
func (r asker) throttling(ctx context.Context, h *handle, health *gpu.Health) error {
	call, read := "nvmlDeviceGetCurrentClocksEventReasons", h.dev.GetCurrentClocksEventReasons
	if !r.has(call) {
		call, read = "nvmlDeviceGetCurrentClocksThrottleReasons", h.dev.GetCurrentClocksThrottleReasons
	}
	reasons, err := ask(ctx, r, h, call, read)
	for _, t := range throttlings {
		if err == nil && reasons&t.bit != 0 {
			health.Throttling = append(health.Throttling, t.reason)
		}
	}
	return err
}

// temperature reads that of the GPU's chip, by the newer function that replaces a deprecated
// one, or by that.
func (r asker) temperature(ctx context.Context, h *handle, health *gpu.Health) (err error) {
	call, read := "nvmlDeviceGetTemperatureV", func() (int, nvml.Return) {
		found, ret := h.dev.GetTemperatureV().V1()
		return int(found.Temperature), ret
	}
	if !r.has(call) {
		call, read = "nvmlDeviceGetTemperature", func() (int, nvml.Return) {
			found, ret := h.dev.GetTemperature(nvml.TEMPERATURE_GPU)
			return int(found), ret
		}
	}
	health.Temperature, err = known(ask(ctx, r, h, call, read))
	return err
}

// FabricPending returns how far the GPU's registration with the NVLink fabric is, as
// gpu.Health.FabricPending has it, but in any MIG mode.
func (c *Client) FabricPending(ctx context.Context, pciAddress string) (state string, err error) {
	if !c.features().fabric {
		return "", nil
	}
	err = c.onGPU(ctx, pciAddress, func(h *handle) error {
		info, err := optional(fabricInfo(ctx, h))
		state = fabricPendings[info.State]
		return err
	})
	return state, err
}
