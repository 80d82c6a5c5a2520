// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Waiting for a change of the machine (gs_bell in state.h), without asking again and again.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "state.h"

#include <linux/futex.h>
#include <limits.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SECOND = 1000000000 };

uint32_t gs_bell(const struct gs_handle *h)
{
	return atomic_load(&h->file->bell);
}

// The futexes are not private: other processes ring. A mapping that is read-only will do.
void gs_wait_for_bell(const struct gs_handle *h, uint32_t seen, int64_t nanoseconds)
{
	struct timespec limit = {.tv_sec = nanoseconds / SECOND, .tv_nsec = nanoseconds % SECOND};
	if (nanoseconds > 0)
		syscall(SYS_futex, &h->file->bell, FUTEX_WAIT, seen, &limit, NULL, 0);
}

// The number changes as well, for who has read it and does not wait yet.
void gs_wake(const struct gs_handle *h)
{
	if (h->writable)
		atomic_fetch_add(&h->file->bell, 1);
	syscall(SYS_futex, &h->file->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
