// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What go-nvml never passes: wrong versions, small buffers, null pointers and
// handles that are none. Prints what was answered wrongly.

#include <nvml.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int failures;

static void check(const char *what, nvmlReturn_t got, nvmlReturn_t want)
{
	if (got == want)
		return;
	printf("%s: %d, want %d\n", what, (int)got, (int)want);
	failures++;
}

#define CHECK(call, want) check(#call, call, want)

static void versions(nvmlDevice_t d)
{
	nvmlMemory_v2_t memory = {.version = 2};
	CHECK(nvmlDeviceGetMemoryInfo_v2(d, &memory), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	memory.version = nvmlMemory_v2;
	CHECK(nvmlDeviceGetMemoryInfo_v2(d, &memory), NVML_SUCCESS);
	nvmlGpuInstanceProfileInfo_v2_t profile = {.version = nvmlMemory_v2};
	CHECK(nvmlDeviceGetGpuInstanceProfileInfoV(d, 0, &profile), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	nvmlPciInfoExt_t pci = {.version = 0};
	CHECK(nvmlDeviceGetPciInfoExt(d, &pci), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	nvmlDeviceAddressingMode_t mode = {.version = 0};
	CHECK(nvmlDeviceGetAddressingMode(d, &mode), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	nvmlUUID_t uuid = {.version = 0, .type = NVML_UUID_TYPE_ASCII};
	CHECK(nvmlDeviceGetHandleByUUIDV(&uuid, &d), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	uuid.version = nvmlUUID_v1;
	strcpy(uuid.value.str, "GPU-00000000-0000-4000-8000-000000000000");
	CHECK(nvmlDeviceGetHandleByUUIDV(&uuid, &d), NVML_SUCCESS);
	uuid.type = NVML_UUID_TYPE_BINARY;
	memcpy(uuid.value.bytes, "\0\0\0\0\0\0\x40\0\x80\0\0\0\0\0\0\0", 16);
	CHECK(nvmlDeviceGetHandleByUUIDV(&uuid, &d), NVML_SUCCESS);
}

static void buffers(nvmlDevice_t d)
{
	char text[96];
	unsigned int count = 0;
	CHECK(nvmlDeviceGetUUID(d, text, 40), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlDeviceGetUUID(d, text, 41), NVML_SUCCESS);
	CHECK(nvmlDeviceGetName(d, text, 3), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlSystemGetDriverVersion(text, 9), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlSystemGetProcessName(4711, text, 4), NVML_SUCCESS);
	if (strcmp(text, "pyt") != 0)
		check("cut process name", NVML_ERROR_UNKNOWN, NVML_SUCCESS);
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(d, &count, NULL), NVML_ERROR_INSUFFICIENT_SIZE);
	if (count != 2)
		check("number of processes", NVML_ERROR_UNKNOWN, NVML_SUCCESS);
	nvmlProcessInfo_t infos[2];
	count = 1;
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(d, &count, infos), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(d, &count, infos), NVML_SUCCESS);
	nvmlProcessInfo_v1_t old[2];
	CHECK(nvmlDeviceGetComputeRunningProcesses(d, &count, old), NVML_SUCCESS);
	if (infos[1].pid != 4712 || infos[1].gpuInstanceId != 0xFFFFFFFF || old[1].pid != 4712)
		check("second process", NVML_ERROR_UNKNOWN, NVML_SUCCESS);
}

static void nulls(nvmlDevice_t d)
{
	CHECK(nvmlDeviceGetUUID(d, NULL, 96), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetCount_v2(NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetHandleByUUID(NULL, &d), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetMigMode(d, NULL, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceSetMigMode(d, 1, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetGpuInstanceProfileInfo(d, 0, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceCreateGpuInstanceWithPlacement(d, 19, NULL, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetMemoryInfo(d, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetPciInfo_v3(d, NULL), NVML_ERROR_INVALID_ARGUMENT);
}

static void handles(nvmlDevice_t good)
{
	char text[96];
	void *const bad[] = {NULL, (void *)1, &failures, (char *)good.handle + 1, (char *)good.handle + (1 << 20)};
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		nvmlDevice_t d = {bad[i]};
		nvmlGpuInstance_t gi = {bad[i]};
		nvmlComputeInstance_t ci = {bad[i]};
		CHECK(nvmlDeviceGetUUID(d, text, sizeof(text)), NVML_ERROR_INVALID_ARGUMENT);
		CHECK(nvmlGpuInstanceDestroy(gi), NVML_ERROR_INVALID_ARGUMENT);
		CHECK(nvmlComputeInstanceDestroy(ci), NVML_ERROR_INVALID_ARGUMENT);
	}
	// A handle of another kind.
	nvmlGpuInstance_t gi = {(void *)good.handle};
	CHECK(nvmlGpuInstanceDestroy(gi), NVML_ERROR_INVALID_ARGUMENT);
}

int main(void)
{
	nvmlDevice_t d;
	unsigned int count;
	CHECK(nvmlShutdown(), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlDeviceGetCount_v2(&count), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlDeviceGetFanSpeed((nvmlDevice_t){NULL}, &count), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlInit_v2(), NVML_SUCCESS);
	CHECK(nvmlDeviceGetHandleByIndex_v2(0, &d), NVML_SUCCESS);
	if (failures == 0) {
		versions(d);
		buffers(d);
		nulls(d);
		handles(d);
	}
	CHECK(nvmlShutdown(), NVML_SUCCESS);
	CHECK(nvmlDeviceGetUUID(d, NULL, 0), NVML_ERROR_UNINITIALIZED);
	return failures != 0;
}
