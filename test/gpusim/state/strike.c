// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Which fault strikes a call (state.h).

#include "state.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_program(const char *function)
{
	return strncmp(function, "nvml", 4) != 0;
}

static int matches(const struct gs_fault *f, const char *function, uint32_t gpus)
{
	return (f->gpu < 0 || (gpus >> f->gpu & 1u) != 0) &&
	       (strcmp(f->function, function) == 0 || (strcmp(f->function, "*") == 0 && !is_program(function)));
}

static int drawn(double probability)
{
	uint64_t random = 0;
	if (probability <= 0 || probability >= 1)
		return 1; // 0 means 1
	if (syscall(SYS_getrandom, &random, sizeof(random), 0) != (long)sizeof(random))
		return 0;
	return (double)(random >> 11) * 0x1p-53 < probability;
}

// All faults that match count the call, so that "the third call" is the same one
// for each of them.
const struct gs_fault *gs_strike(struct gs_handle *h, const struct gs_machine *m, const char *function, uint32_t gpus)
{
	const struct gs_fault *first = NULL;
	for (int i = 0; i < gs_bounded(m->fault_count, GS_MAX_FAULTS); i++) {
		const struct gs_fault *f = &m->faults[i];
		if (!matches(f, function, gpus))
			continue;
		uint64_t number = gs_fault_seen(h, f->serial);
		uint64_t skip = (uint64_t)f->skip, times = (uint64_t)f->times;
		if (first == NULL && number >= skip && (times == 0 || number - skip < times) && drawn(f->probability))
			first = f;
	}
	if (first != NULL)
		gs_fault_struck(h, first->serial);
	return first;
}
