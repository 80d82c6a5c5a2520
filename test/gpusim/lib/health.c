// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What a GPU says about its own state.

#include "lib.h"

#include <stdio.h>
#include <stdlib.h>

int driver_major(void)
{
	return atoi(view.driver_version);
}

// HEALTHY begins a function about the health of a GPU, which a MIG device does not have.
#define HEALTHY(valid)                                     \
	ENTER();                                           \
	struct target t;                                   \
	nvmlReturn_t r = target_device(&view, device, &t); \
	if (r != NVML_SUCCESS)                             \
		return r;                                  \
	if (!(valid))                                      \
		return NVML_ERROR_INVALID_ARGUMENT;        \
	if (t.ci != NULL)                                  \
		return NVML_ERROR_NOT_SUPPORTED;           \
	const struct gs_health *health = &t.gpu->health

static unsigned long long ecc_errors(const struct gs_health *h, int uncorrected, int aggregate)
{
	if (aggregate)
		return uncorrected ? h->aggregate_uncorrected : h->aggregate_corrected;
	return uncorrected ? h->volatile_uncorrected : h->volatile_corrected;
}

static nvmlReturn_t count_ecc(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
			      int somewhere_else, unsigned long long *out)
{
	HEALTHY(out != NULL && (unsigned int)type < NVML_MEMORY_ERROR_TYPE_COUNT &&
		(unsigned int)counter < NVML_ECC_COUNTER_TYPE_COUNT);
	if (t.gpu->ecc <= 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = somewhere_else ? 0
			      : ecc_errors(health, type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
					   counter == NVML_AGGREGATE_ECC);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					 nvmlEccCounterType_t counterType, unsigned long long *eccCounts)
{
	return count_ecc(device, errorType, counterType, 0, eccCounts);
}

// All errors are in the device memory.
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					     nvmlEccCounterType_t counterType, nvmlMemoryLocation_t locationType,
					     unsigned long long *count)
{
	return count_ecc(device, errorType, counterType, locationType != NVML_MEMORY_LOCATION_DEVICE_MEMORY, count);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrRows, unsigned int *uncRows,
				       unsigned int *isPending, unsigned int *failureOccurred)
{
	HEALTHY(corrRows != NULL && uncRows != NULL && isPending != NULL && failureOccurred != NULL);
	// nvml.h: Ampere or newer, and not on GPUs with active instances.
	if (t.gpu->architecture < NVML_DEVICE_ARCH_AMPERE || t.gpu->ecc <= 0 || t.gpu->instance_count > 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*corrRows = (unsigned int)health->remapped_corrected;
	*uncRows = (unsigned int)health->remapped_uncorrected;
	*isPending = health->remap_pending != 0;
	*failureOccurred = health->remap_failed != 0;
	return NVML_SUCCESS;
}

// GPUs before Ampere retire pages, which begins at the next reset.
nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *isPending)
{
	HEALTHY(isPending != NULL);
	if (t.gpu->architecture >= NVML_DEVICE_ARCH_AMPERE || t.gpu->ecc <= 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*isPending = health->retired_pending ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *repairStatus)
{
	HEALTHY(repairStatus != NULL);
	if (repairStatus->version != nvmlRepairStatus_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (t.gpu->architecture < NVML_DEVICE_ARCH_AMPERE)
		return NVML_ERROR_NOT_SUPPORTED;
	repairStatus->bChannelRepairPending = health->channel_repair != 0;
	repairStatus->bTpcRepairPending = health->tpc_repair != 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device,
						    nvmlUnrepairableMemoryStatus_v1_t *unrepairableMemoryStatus)
{
	HEALTHY(unrepairableMemoryStatus != NULL);
	if (t.gpu->architecture < NVML_DEVICE_ARCH_AMPERE)
		return NVML_ERROR_NOT_SUPPORTED;
	unrepairableMemoryStatus->bUnrepairableMemory = health->unrepairable != 0;
	return NVML_SUCCESS;
}

static nvmlReturn_t clocks_reasons(nvmlDevice_t device, unsigned long long *reasons)
{
	HEALTHY(reasons != NULL);
	*reasons = health->clocks_reasons;
	if (utilization(&t) == 0)
		*reasons |= nvmlClocksEventReasonGpuIdle;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *clocksEventReasons)
{
	return clocks_reasons(device, clocksEventReasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *clocksThrottleReasons)
{
	return clocks_reasons(device, clocksThrottleReasons);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensorType, unsigned int *temp)
{
	HEALTHY(temp != NULL && sensorType == NVML_TEMPERATURE_GPU);
	*temp = (unsigned int)health->temperature;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
	HEALTHY(temperature != NULL && temperature->sensorType == NVML_TEMPERATURE_GPU);
	if (temperature->version != nvmlTemperature_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	temperature->temperature = health->temperature;
	return NVML_SUCCESS;
}

// parse_uuid reads 32 hexadecimal digits with dashes between them; all zeros if there are fewer.
static void parse_uuid(const char *text, unsigned char out[NVML_GPU_FABRIC_UUID_LEN])
{
	memset(out, 0, NVML_GPU_FABRIC_UUID_LEN);
	for (int i = 0, read = 0; i < NVML_GPU_FABRIC_UUID_LEN; i++, text += read) {
		if (*text == '-')
			text++;
		if (sscanf(text, "%2hhx%n", &out[i], &read) != 1)
			return;
	}
}

static nvmlReturn_t read_fabric(const struct gs_gpu *gpu, nvmlGpuFabricInfo_t *info)
{
	if (gpu->health.fabric_state == NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
		return NVML_ERROR_NOT_SUPPORTED;
	parse_uuid(gpu->cluster_uuid, info->clusterUuid);
	info->status = (nvmlReturn_t)gpu->health.fabric_status;
	info->cliqueId = (unsigned int)gpu->clique_id;
	info->state = (nvmlGpuFabricState_t)gpu->health.fabric_state;
	// The driver does not probe the fabric while there are GPU instances, and begins anew after
	// the last one. Which state it reports meanwhile is assumed.
	if (gpu->instance_count > 0)
		info->state = NVML_GPU_FABRIC_STATE_NOT_STARTED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *gpuFabricInfo)
{
	HEALTHY(gpuFabricInfo != NULL);
	(void)health;
	return read_fabric(t.gpu, gpuFabricInfo);
}

// The third version has a summary behind what the second one has. None is modelled.
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *gpuFabricInfo)
{
	nvmlGpuFabricInfo_t info;

	HEALTHY(gpuFabricInfo != NULL);
	if (gpuFabricInfo->version != nvmlGpuFabricInfo_v2 && gpuFabricInfo->version != nvmlGpuFabricInfo_v3)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if ((r = read_fabric(t.gpu, &info)) != NVML_SUCCESS)
		return r;
	memcpy(gpuFabricInfo->clusterUuid, info.clusterUuid, sizeof(info.clusterUuid));
	gpuFabricInfo->status = info.status;
	gpuFabricInfo->cliqueId = info.cliqueId;
	gpuFabricInfo->state = info.state;
	gpuFabricInfo->healthMask = health->fabric_mask;
	if (gpuFabricInfo->version == nvmlGpuFabricInfo_v3)
		gpuFabricInfo->healthSummary = NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED;
	return NVML_SUCCESS;
}

// read_field gives the value of one of the few fields that are modelled.
static nvmlReturn_t read_field(const struct gs_gpu *gpu, nvmlFieldValue_t *v)
{
	int ecc = gpu->ecc > 0;
	v->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
	switch (v->fieldId) {
	case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
	case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
		v->value.ullVal = ecc_errors(&gpu->health, v->fieldId == NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0);
		return ecc ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_ECC_SBE_AGG_TOTAL:
	case NVML_FI_DEV_ECC_DBE_AGG_TOTAL:
		v->value.ullVal = ecc_errors(&gpu->health, v->fieldId == NVML_FI_DEV_ECC_DBE_AGG_TOTAL, 1);
		return ecc ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
		if (driver_major() < RECOVERY_DRIVER)
			return NVML_ERROR_INVALID_ARGUMENT; // a number that it does not know
		v->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
		v->value.uiVal = (unsigned int)gpu->health.recovery_action;
		return NVML_SUCCESS;
	case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
		return nvlink_field(gpu, v);
	}
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int valuesCount, nvmlFieldValue_t *values)
{
	HEALTHY(values != NULL && valuesCount > 0);
	(void)health;
	for (int i = 0; i < valuesCount; i++)
		values[i].nvmlReturn = read_field(t.gpu, &values[i]);
	return NVML_SUCCESS;
}
