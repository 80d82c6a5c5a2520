// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// How busy processes keep a GPU. What a process does is a number in the machine; each call
// finds a sample of just now.

#include "lib.h"

#include <time.h>

unsigned int utilization(const struct target *t)
{
	unsigned int sum = 0;
	add_holders();
	for (int i = 0; i < view.process_count; i++)
		if (on_target(&view.processes[i], t))
			sum += (unsigned int)view.processes[i].sm;
	return sum > 100 ? 100 : sum;
}

static unsigned long long microseconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

// undivided begins a function that nvml.h does not support on GPUs in MIG mode.
static nvmlReturn_t undivided(nvmlDevice_t device, struct target *t)
{
	nvmlReturn_t r = target_device(&view, device, t);
	if (r == NVML_SUCCESS && t->gpu->mig_current)
		r = NVML_ERROR_NOT_SUPPORTED;
	return r;
}

static unsigned int memory_share(const struct gs_gpu *gpu, uint64_t used)
{
	return gpu->memory_bytes == 0 ? 0 : (unsigned int)(used * 100 / gpu->memory_bytes);
}

// Of the memory NVML means how often it is read and written, for which there is no model.
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = undivided(device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (rates == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	rates->gpu = utilization(&t);
	rates->memory = rates->gpu / 2;
	return NVML_SUCCESS;
}

// busy reports whether a process has a sample on the target that the caller can see.
static int busy(const struct gs_process *p, const struct target *t)
{
	return on_target(p, t) && p->sm > 0 && p->pid > 0;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
					     unsigned int *processSamplesCount, unsigned long long lastSeenTimeStamp)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = undivided(device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (processSamplesCount == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	unsigned long long now = microseconds();
	unsigned int room = samples == NULL ? 0 : *processSamplesCount, found = 0;
	add_holders();
	for (int i = 0; i < view.process_count && now > lastSeenTimeStamp; i++) {
		const struct gs_process *p = &view.processes[i];
		if (!busy(p, &t))
			continue;
		if (found < room)
			samples[found] = (nvmlProcessUtilizationSample_t){
				.pid = (unsigned int)p->pid,
				.timeStamp = now,
				.smUtil = (unsigned int)p->sm,
				.memUtil = memory_share(t.gpu, p->memory_bytes),
			};
		found++;
	}
	*processSamplesCount = found;
	if (found == 0)
		return NVML_ERROR_NOT_FOUND;
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = undivided(device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (info->version != nvmlProcessesUtilizationInfo_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	unsigned long long now = microseconds();
	unsigned int room = info->procUtilArray == NULL ? 0 : info->processSamplesCount, found = 0;
	add_holders();
	for (int i = 0; i < view.process_count && now > info->lastSeenTimeStamp; i++) {
		const struct gs_process *p = &view.processes[i];
		if (!busy(p, &t))
			continue;
		if (found < room)
			info->procUtilArray[found] = (nvmlProcessUtilizationInfo_v1_t){
				.pid = (unsigned int)p->pid,
				.timeStamp = now,
				.smUtil = (unsigned int)p->sm,
				.memUtil = memory_share(t.gpu, p->memory_bytes),
			};
		found++;
	}
	info->processSamplesCount = found;
	if (found == 0)
		return NVML_ERROR_NOT_FOUND;
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
