// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#include "wait.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { SECOND = 1000000000 };

int64_t monotonic(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

void wait_for(int64_t duration)
{
	if (duration <= 0)
		return;
	int64_t end = monotonic() + duration;
	struct timespec until = {.tv_sec = end / SECOND, .tv_nsec = end % SECOND};
	// Signals interrupt it, and Go sends many.
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
		;
}

void take_time(const char *state, int gpu, const struct gs_latency *l)
{
	struct gs_handle h;
	if (l->base <= 0 && l->per_instance <= 0)
		return;
	if (gs_open(state, &h) != 0) {
		wait_for(l->base);
		return;
	}
	int alone = l->exclusive && gpu >= 0 && gs_lock_gpu(&h, gpu) == 0;
	int64_t start = monotonic();
	wait_for(l->base + l->per_instance * gs_instances(&h, gpu));
	if (alone)
		gs_add_busy(&h, gpu, (uint64_t)(monotonic() - start));
	gs_close(&h); // also lets go of the GPU
}

void kill_self(void)
{
	for (;;) {
		kill(getpid(), SIGKILL);
		pause();
	}
}
