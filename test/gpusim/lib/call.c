// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What happens to a call: faults, failures of GPUs and time. The decision is
// made under the process's lock, what follows from it happens without.

#include "lib.h"
#include "wait.h"

#include <stdio.h>
#include <stdlib.h>

// A verdict says that a call is not like others. It has copies of all that it
// needs, for the machine may change while the call waits.
struct verdict {
	int gpu;
	int failure;
	struct gs_fault fault;     // with effect GS_PROCEED if none struck
	struct gs_fault lock;      // that others may have locked all GPUs for; all zero if there is none
	struct gs_latency latency; // the same
	char state[GS_PATH];
};

static const struct gs_latency *latency_of(const struct gs_machine *m, const char *function)
{
	for (int i = 0; i < m->latency_count; i++)
		if (strcmp(m->latencies[i].function, function) == 0)
			return &m->latencies[i];
	return NULL;
}

static int failure_of(const struct gs_machine *m, int gpu)
{
	return gpu < 0 || gpu >= m->gpu_count ? 0 : m->gpus[gpu].failure;
}

static void judge(struct call *call, struct gs_handle *h, const struct gs_machine *m, const char *path)
{
	gs_count(h, call->function);
	if (m->fault_count == 0 && m->latency_count == 0 && m->failing == 0)
		return;
	int gpu = call->find == NULL ? -1 : call->find(call->key);
	const struct gs_fault *fault = gs_strike(h, m, call->function, gpu < 0 ? 0 : 1u << gpu);
	const struct gs_latency *latency = latency_of(m, call->function);
	const struct gs_fault *lock = gpu < 0 || fault != NULL ? NULL : gs_fault_of_all_gpus(m);
	if (fault == NULL && latency == NULL && lock == NULL && failure_of(m, gpu) == 0)
		return;
	struct verdict *v = calloc(1, sizeof(*v));
	if (v == NULL)
		return;
	v->gpu = gpu;
	v->failure = failure_of(m, gpu);
	v->fault.effect = GS_PROCEED;
	if (fault != NULL)
		v->fault = *fault;
	if (lock != NULL)
		v->lock = *lock;
	if (latency != NULL)
		v->latency = *latency;
	snprintf(v->state, sizeof(v->state), "%s", path);
	call->verdict = v;
}

// recheck notices what became of the GPU while the call waited.
static void recheck(struct call *call, struct gs_handle *h, const struct gs_machine *m, const char *path)
{
	(void)h;
	(void)path;
	call->verdict->failure = failure_of(m, call->verdict->gpu);
}

static uint32_t bit_of(int gpu)
{
	return gpu < 0 ? 0 : 1u << gpu;
}

static void endure(const struct call *call)
{
	const struct verdict *v = call->verdict;
	gs_endure(v->state, &v->fault, call->function, bit_of(v->gpu));
}

// works_when_lost: a GPU that is lost still has its place on the bus, and what happened to
// it before is still told.
static int works_when_lost(const char *function)
{
	static const char *const beginnings[] = {
		"nvmlDeviceGetCount",
		"nvmlDeviceGetHandleByIndex",
		"nvmlDeviceGetHandleByPciBusId",
		"nvmlDeviceGetIndex",
		"nvmlDeviceGetPciInfo",
		"nvmlEventSet",
	};
	for (size_t i = 0; i < sizeof(beginnings) / sizeof(beginnings[0]); i++)
		if (strncmp(function, beginnings[i], strlen(beginnings[i])) == 0)
			return 1;
	return 0;
}

// reports_after reports whether the call happens and something else is reported.
static int reports_after(const struct verdict *v)
{
	return v->fault.effect == GS_FAIL_AFTER || v->fault.effect == GS_KILL_AFTER;
}

// instead does what the fault wants in place of the call, and reports whether it
// wanted that.
static int instead(struct call *call)
{
	const struct verdict *v = call->verdict;
	if (reports_after(v))
		return 0;
	endure(call);
	switch (v->fault.effect) {
	case GS_FAIL:
		call->result = (nvmlReturn_t)v->fault.code;
		return 1;
	case GS_PRETEND:
		call->result = NVML_SUCCESS;
		return 1;
	case GS_KILL_BEFORE:
		kill_self();
	}
	return 0;
}

int call_begins(struct call *call)
{
	consult(judge, call);
	const struct verdict *v = call->verdict;
	if (v == NULL)
		return 1;
	if (instead(call))
		return 0;
	if (v->lock.all_gpus)
		gs_wait_behind(v->state, &v->lock, call->function, bit_of(v->gpu));
	consult(recheck, call);
	if (v->failure != 0 && !works_when_lost(call->function)) {
		call->result = (nvmlReturn_t)v->failure;
		return 0;
	}
	take_time(v->state, v->gpu, &v->latency);
	return 1;
}

void call_ends(struct call *call)
{
	struct verdict *v = call->verdict;
	if (v == NULL)
		return;
	if (reports_after(v)) {
		endure(call);
		if (v->fault.effect == GS_KILL_AFTER)
			kill_self();
		call->result = (nvmlReturn_t)v->fault.code;
	}
	free(v);
}
