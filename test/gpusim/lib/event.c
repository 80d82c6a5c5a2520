// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Events. The machine keeps the last ones, with numbers; a set remembers up to which number
// it was read, and for each GPU from which number on it has what.

#include "lib.h"
#include "wait.h"

#include <stdlib.h>

struct registration {
	uint64_t types; // 0: none
	uint64_t first; // number of the first event that happened afterwards
	int32_t resets; // of the GPU: none outlives one
};

struct event_set {
	struct event_set *next;
	uint64_t cursor;
	struct registration gpus[GS_MAX_GPUS];
};

static struct event_set *sets;

static struct event_set *set_of(const void *handle)
{
	for (struct event_set *s = sets; s != NULL; s = s->next)
		if (s == handle)
			return s;
	return NULL;
}

// A set with several GPUs is on none: a call that waits for all of them.
int gpu_of_event_set(const void *handle)
{
	const struct event_set *s = set_of(handle);
	int found = -1, count = 0;
	for (int i = 0; s != NULL && i < view.gpu_count; i++)
		if (s->gpus[i].types != 0) {
			found = i;
			count++;
		}
	return count == 1 ? found : -1;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	ENTER();
	if (set == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	struct event_set *s = calloc(1, sizeof(*s));
	if (s == NULL)
		return NVML_ERROR_UNKNOWN;
	s->cursor = view.next_event;
	s->next = sets;
	sets = s;
	set->handle = (void *)s;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	ENTER();
	for (struct event_set **s = &sets; *s != NULL; s = &(*s)->next)
		if (*s == (void *)set.handle) {
			struct event_set *freed = *s;
			*s = freed->next;
			free(freed);
			return NVML_SUCCESS;
		}
	return NVML_ERROR_INVALID_ARGUMENT;
}

static uint64_t supported_types(const struct gs_gpu *gpu)
{
	uint64_t types = nvmlEventTypeXidCriticalError | nvmlEventTypePState;
	if (gpu->no_events)
		return 0;
	if (gpu->ecc > 0)
		types |= nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
	if (driver_major() >= RECOVERY_DRIVER)
		types |= nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction;
	return types;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *eventTypes)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (eventTypes == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*eventTypes = t.ci != NULL ? 0 : supported_types(t.gpu);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long eventTypes, nvmlEventSet_t set)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	struct event_set *s = set_of(set.handle);
	if (s == NULL || (eventTypes & ~(unsigned long long)nvmlEventTypeAll) != 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t.ci != NULL || (eventTypes & ~supported_types(t.gpu)) != 0)
		return NVML_ERROR_NOT_SUPPORTED;
	struct registration *reg = &s->gpus[t.index];
	if (reg->types == 0 || reg->resets != t.gpu->resets)
		*reg = (struct registration){.first = view.next_event, .resets = t.gpu->resets};
	reg->types |= eventTypes;
	return NVML_SUCCESS;
}

// wants reports whether a set gets the event with a number.
static int wants(const struct event_set *s, uint64_t number, const struct gs_event *e)
{
	if (e->gpu < 0 || e->gpu >= view.gpu_count)
		return 0;
	const struct registration *reg = &s->gpus[e->gpu];
	return (reg->types & e->type) != 0 && number >= reg->first && reg->resets == view.gpus[e->gpu].resets &&
	       (e->instance_id < 0 || may_configure());
}

// take_event gives the next event of a set, or what there is instead of one: TIMEOUT means
// none.
static nvmlReturn_t take_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
	ENTER();
	struct event_set *s = set_of(set.handle);
	if (s == NULL || data == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (s->cursor + GS_MAX_EVENTS < view.next_event)
		s->cursor = view.next_event - GS_MAX_EVENTS; // the others are lost
	while (s->cursor < view.next_event) {
		uint64_t number = s->cursor++;
		const struct gs_event *e = &view.events[number % GS_MAX_EVENTS];
		if (!wants(s, number, e))
			continue;
		data->device = gpu_handle(e->gpu);
		data->eventType = e->type;
		data->eventData = e->data;
		data->gpuInstanceId = (unsigned int)e->instance_id; // -1 is NVML's 0xFFFFFFFF
		data->computeInstanceId = (unsigned int)e->compute_id;
		return NVML_SUCCESS;
	}
	for (int i = 0; i < view.gpu_count; i++)
		if (s->gpus[i].types != 0 && view.gpus[i].failure == NVML_ERROR_GPU_IS_LOST)
			return NVML_ERROR_GPU_IS_LOST;
	return NVML_ERROR_TIMEOUT;
}

// Nothing is held between two looks, so that nvmlShutdown and other calls go on.
static nvmlReturn_t wait_for_event(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	struct gs_handle own;
	nvmlReturn_t r = open_again(&own);
	if (r != NVML_SUCCESS)
		return r;
	int64_t end = monotonic() + (int64_t)timeoutms * 1000000;
	for (;;) {
		uint32_t bell = gs_bell(&own);
		r = take_event(set, data);
		int64_t left = end - monotonic();
		if (r != NVML_ERROR_TIMEOUT || left <= 0)
			break;
		gs_wait_for_bell(&own, bell, left);
	}
	gs_close(&own);
	return r;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	return wait_for_event(set, data, timeoutms);
}

// Old callers have a structure that ends before the instances.
nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	nvmlEventData_t v2;
	nvmlReturn_t r = wait_for_event(set, data == NULL ? NULL : &v2, timeoutms);
	if (r == NVML_SUCCESS) {
		data->device = v2.device;
		data->eventType = v2.eventType;
		data->eventData = v2.eventData;
	}
	return r;
}
