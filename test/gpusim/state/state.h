// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Access to the shared state file, for the simulated libnvidia-ml and, through
// cgo, for the Go tools. Functions that can fail return 0 or an errno value.
//
// One gs_handle serves one thread at a time: callers bring their own mutex.
// Between processes, and between handles, the functions are safe.

#ifndef GPUSIM_STATE_H
#define GPUSIM_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum { GS_PATH = 4096 };

// Where a process finds the state and the trees beside it.
struct gs_paths {
	char state[GS_PATH];
	char root[GS_PATH]; // "" for "/", else without a slash at the end
};

struct gs_handle {
	int fd;
	int writable;
	int locked;
	struct gs_file *file;
	struct gs_machine *next; // the slot being changed, between begin and commit
	// Folder "…/driver/nvidia/capabilities" that follows the instances; ""
	// where the state is not at its place in a root.
	char capabilities[GS_PATH];
};

// The state is not usable because another layout version wrote it.
#define GS_ELAYOUT 10001
// The file is not a state file at all.
#define GS_EMAGIC 10002

// gs_strerror is strerror that knows the two values above.
const char *gs_strerror(int err);

// gs_find looks for the state on behalf of the library or executable self (an
// absolute path): the environment's GPUSIM_STATE, then var/lib/gpusim/state in
// the root that self lies in, then the link beside the library. ENOENT if none.
int gs_find(const char *self, struct gs_paths *out);

// gs_create writes a new state file and puts it in the place of path at once.
// Processes that have the old one open keep it.
int gs_create(const char *path, const struct gs_machine *m);

// gs_open maps the file, for writing where the caller may write it.
int gs_open(const char *path, struct gs_handle *h);
void gs_close(struct gs_handle *h);

// gs_generation grows with every commit.
uint64_t gs_generation(const struct gs_handle *h);

// gs_read copies one consistent machine and returns its generation. It takes
// no lock and never waits for a writer.
uint64_t gs_read(const struct gs_handle *h, struct gs_machine *out);

// gs_begin takes the writer lock, repairs the capability files if the last
// writer died, and gives the caller a copy of the machine to change in h->next.
// EROFS if the handle is read-only. gs_commit makes the capability files follow
// and publishes the copy; on error nothing has changed. Either gs_commit or
// gs_abort must follow gs_begin.
int gs_begin(struct gs_handle *h);
int gs_commit(struct gs_handle *h);
void gs_abort(struct gs_handle *h);

// gs_repair takes the lock if the last writer died, and repairs.
int gs_repair(struct gs_handle *h);

// gs_sync_capabilities writes all capability files anew, under the lock.
int gs_sync_capabilities(struct gs_handle *h);

// gs_capabilities_follow brings the files below folder dir from the machine
// before (NULL: unknown, look at the disk) to the machine after.
int gs_capabilities_follow(const char *dir, const struct gs_machine *before, const struct gs_machine *after);

// gs_count counts one call of an unmodelled function. Failure is silent: a
// container has the file read-only.
void gs_count(struct gs_handle *h, const char *name);

// gs_counter_at reads the i-th counter. ENOENT past the end, EAGAIN where there
// is none.
int gs_counter_at(const struct gs_handle *h, int i, const char **name, uint64_t *calls);

// Small helpers that several files need.
int32_t gs_bounded(int32_t count, int32_t limit);
int gs_is_char_device(const char *path);
int gs_join(char *out, size_t size, const char *dir, const char *name);

#endif
