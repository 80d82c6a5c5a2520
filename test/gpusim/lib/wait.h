// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Waiting, without the process's lock. Who waits for something of the state
// opens it again, by its path: nvmlShutdown in another thread then takes nothing
// away, and threads of a process exclude each other like processes.

#ifndef GPUSIM_WAIT_H
#define GPUSIM_WAIT_H

#include <stdint.h>

#include "state.h"

// monotonic is the time in nanoseconds of a clock that nobody sets.
int64_t monotonic(void);

// wait_for waits some nanoseconds, at once if there are none.
void wait_for(int64_t duration);

// take_time is what a latency costs on a GPU (-1: on none).
void take_time(const char *state, int gpu, const struct gs_latency *l);

// kill_self ends the process as SIGKILL from outside does.
_Noreturn void kill_self(void);

#endif
