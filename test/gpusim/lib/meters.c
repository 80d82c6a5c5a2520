// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What a GPU draws, and what it moves over NVLink and PCIe. A MIG device has no meters.

#include "lib.h"

#include <limits.h>

static nvmlReturn_t whole(nvmlDevice_t device, struct target *t)
{
	nvmlReturn_t r = target_device(&view, device, t);
	if (r == NVML_SUCCESS && t->ci != NULL)
		r = NVML_ERROR_NOT_SUPPORTED;
	return r;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = whole(device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (power == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t.gpu->meters.milliwatts == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*power = (unsigned int)t.gpu->meters.milliwatts;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *value)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = whole(device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (value == NULL || (unsigned int)counter >= NVML_PCIE_UTIL_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	int32_t kb = counter == NVML_PCIE_UTIL_TX_BYTES ? t.gpu->meters.pcie_tx_kb : t.gpu->meters.pcie_rx_kb;
	if (kb < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*value = (unsigned int)kb;
	return NVML_SUCCESS;
}

// That there are no counters while MIG mode is on, as links are inactive then, is assumed, as is that
// the traffic is the same on all links.
nvmlReturn_t nvlink_field(const struct gs_gpu *gpu, nvmlFieldValue_t *v)
{
	if (gpu->nvlink_count == 0 || gpu->mig_current)
		return NVML_ERROR_NOT_SUPPORTED;
	if (v->scopeId != UINT_MAX && v->scopeId >= (unsigned int)gpu->nvlink_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	uint64_t kib = v->fieldId == NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX ? gpu->meters.nvlink_tx_kib : gpu->meters.nvlink_rx_kib;
	v->value.ullVal = v->scopeId == UINT_MAX ? kib : kib / (uint64_t)gpu->nvlink_count;
	return NVML_SUCCESS;
}
