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
	uint64_t owner; // that gs_own gave to this handle, or 0
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

// GS_HOME is the folder in a root that holds the state and what changes with it.
#define GS_HOME "var/lib/gpusim"

// gs_root_of_state gives the root if path is the state's place in one, else ENOENT.
int gs_root_of_state(const char *path, char *root);

// gs_is_link reports whether a file of a root is a symbolic link.
int gs_is_link(const char *root, const char *name);

// gs_make_node makes a character device that everybody may use, unless there is one.
int gs_make_node(const char *path, unsigned int major, unsigned int minor);

// gs_create writes a new state file and puts it in the place of path at once.
// Processes that have the old one open keep it.
int gs_create(const char *path, const struct gs_machine *m);

// gs_open maps the file, for writing where the caller may write it.
int gs_open(const char *path, struct gs_handle *h);
void gs_close(struct gs_handle *h);

// gs_generation grows with every commit.
uint64_t gs_generation(const struct gs_handle *h);

// gs_bell is a number that changes with every commit. gs_wait_for_bell waits until it is
// not the one that was seen any more, for some nanoseconds at most; it may return before.
// gs_wake ends waiting without a commit; where the file is read-only, only that which has begun.
uint32_t gs_bell(const struct gs_handle *h);
void gs_wait_for_bell(const struct gs_handle *h, uint32_t seen, int64_t nanoseconds);
void gs_wake(const struct gs_handle *h);

// gs_read copies one consistent machine and returns its generation. It takes
// no lock and never waits for a writer.
uint64_t gs_read(const struct gs_handle *h, struct gs_machine *out);

// gs_still reports whether the machine of a generation is the one in use, so that
// what was read of it is consistent.
int gs_still(const struct gs_handle *h, uint64_t generation);

// gs_begin takes the writer lock, repairs the capability files if the last
// writer died, and gives the caller a copy of the machine to change in h->next.
// EROFS if the handle is read-only. gs_commit makes the capability files follow
// and publishes the copy; on error nothing has changed. Either gs_commit or
// gs_abort must follow gs_begin.
int gs_begin(struct gs_handle *h);
int gs_commit(struct gs_handle *h);
void gs_abort(struct gs_handle *h);

// gs_own gives the handle an owner, for entries of processes. It is there until
// gs_close or until the process dies, however it does: the owner is a byte that
// the handle has locked, far behind the end of the file. Everybody who can open
// the file can see that, also in other PID namespaces. EROFS if the handle is
// read-only.
int gs_own(struct gs_handle *h);

// gs_owner_lives reports whether an owner is there, which is so where it cannot be told.
int gs_owner_lives(const struct gs_handle *h, uint64_t owner);

// gs_drop_dead removes the entries of processes whose owner is gone. gs_begin
// does it to the machine that is changed.
void gs_drop_dead(const struct gs_handle *h, struct gs_machine *m);

// gs_hold makes this process hold what p says (gpu, instance_id, compute_id, kind, which
// is GS_COMPUTE or GS_HANDLE, memory_bytes and sm) until gs_close or until it dies, without
// the right to write. held is 0 at first, and then what the last call left there: only
// memory and sm may differ. A process must not close another gs_handle of the same file
// meanwhile: that ends what it holds.
int gs_hold(struct gs_handle *h, const struct gs_process *p, uint64_t *held);

// gs_add_holders makes the machine's list of processes have those that hold something
// by gs_hold now. gs_begin does it to the machine that is changed; what the file has of
// them does not count. A process of another PID namespace has the PID 0.
void gs_add_holders(const struct gs_handle *h, struct gs_machine *m);

// gs_open_driver has the driver open until gs_close, and returns how long that takes, in
// nanoseconds: the latency of GS_DRIVER_OPEN if nobody else has it open and a GPU is not
// in persistence mode, else 0.
#define GS_DRIVER_OPEN "driver_open"
int64_t gs_open_driver(struct gs_handle *h);

// gs_repair takes the lock if the last writer died, and repairs.
int gs_repair(struct gs_handle *h);

// gs_sync_capabilities rewrites all capability files, under the lock.
int gs_sync_capabilities(struct gs_handle *h);

// gs_capabilities_follow brings the files below folder dir from the machine
// before (NULL: unknown, look at the disk) to the machine after.
int gs_capabilities_follow(const char *dir, const struct gs_machine *before, const struct gs_machine *after);

// gs_in_place reports whether path still is the file that is open.
int gs_in_place(const struct gs_handle *h, const char *path);

// gs_boot_id copies the boot id of the machine.
void gs_boot_id(const struct gs_handle *h, char out[GS_NAME]);

// gs_wanted_faults has a bit for each GPU on which the owner's MPS
// server is to have a fault.
uint32_t gs_wanted_faults(const struct gs_handle *h, uint64_t owner);

// gs_lock_gpu waits until no other handle holds the GPU, and holds it until
// gs_close. EROFS if the handle is read-only.
int gs_lock_gpu(struct gs_handle *h, int gpu);

// gs_lock_all_gpus waits until no other handle holds all GPUs. With hold, it holds them until
// gs_close: EROFS if the handle is read-only.
int gs_lock_all_gpus(struct gs_handle *h, int hold);

// What follows is in counters.c. Counting fails in silence where the file is
// read-only, as in containers.

// gs_count counts one call of a function, gs_mark_unmodelled says that it has
// no model.
void gs_count(struct gs_handle *h, const char *function);
void gs_mark_unmodelled(struct gs_handle *h, const char *function);

// gs_counter_at reads the i-th counter. ENOENT past the end, EAGAIN where there
// is none.
int gs_counter_at(const struct gs_handle *h, int i, const char **name, uint64_t *calls, int *unmodelled);

// gs_fault_seen counts a call that matches the fault and returns how many there
// were before it. gs_fault_struck counts one that was struck.
uint64_t gs_fault_seen(struct gs_handle *h, uint64_t serial);
void gs_fault_struck(struct gs_handle *h, uint64_t serial);
void gs_fault_counts(const struct gs_handle *h, uint64_t serial, uint64_t *seen, uint64_t *struck);
void gs_fault_start(struct gs_handle *h, uint64_t serial); // at 0

// gs_fault_there reports whether the fault is still there and, if hanging is not 0, makes calls
// hang.
int gs_fault_there(const struct gs_handle *h, uint64_t serial, int hanging);

// gs_strike counts the call and returns the fault in m that decides about it, or
// NULL. gpus has a bit for each GPU that the call is on. A function "*" is all
// functions of the library: not those of programs, whose names begin with GS_MPS or
// are GS_SMI.
#define GS_MPS "mps_"
#define GS_SMI "nvidia-smi"
const struct gs_fault *gs_strike(struct gs_handle *h, const struct gs_machine *m, const char *function, uint32_t gpus);

// gs_endure is the delay of a fault for a call that it strikes, on the GPUs that gpus has bits
// for, and then what keeps it where the fault hangs: until that is gone or no longer hangs, the
// call is let go, or the state file is no longer at its path. A fault of all GPUs has them
// locked meanwhile. It is in gate.c, as is what follows.
void gs_endure(const char *path, const struct gs_fault *f, const char *function, uint32_t gpus);

// gs_fault_of_all_gpus is the first fault that locks all GPUs, or NULL. gs_wait_behind is what a
// call on a GPU does that is not struck while there is one.
const struct gs_fault *gs_fault_of_all_gpus(const struct gs_machine *m);
void gs_wait_behind(const char *path, const struct gs_fault *f, const char *function, uint32_t gpus);

// A call that is held now, or waits behind one that is. Older calls have lower tickets.
struct gs_held_call {
	uint64_t ticket;
	uint64_t fault;
	uint32_t gpus;
	int32_t pid;
	int32_t behind;
	char function[GS_LONG_NAME];
};

// gs_held_at reads the i-th entry. ENOENT past the end, EAGAIN where there is no call.
// gs_let_go lets the call go on that has the ticket, ENOENT if it has gone. Calls of
// processes that may not write the file are in no entry: the fault's end alone lets them go.
int gs_held_at(const struct gs_handle *h, int i, struct gs_held_call *out);
int gs_let_go(struct gs_handle *h, int i, uint64_t ticket);

// gs_instances is how many GPU instances are on the GPU now.
int gs_instances(const struct gs_handle *h, int gpu);

// Time that calls spent with the GPU held, in nanoseconds.
void gs_add_busy(struct gs_handle *h, int gpu, uint64_t duration);
uint64_t gs_busy(const struct gs_handle *h, int gpu);

// gs_cgroup is the inode of a cgroup of version 2, or 0 if there is none at the path.
uint64_t gs_cgroup(const char *path);

// gs_memory_limit_of is the limit of a cgroup on a GPU, or NULL. gs_new_memory_limit makes one for
// it, with all memory as the hard limit: NULL where there is no room.
struct gs_memory_limit *gs_memory_limit_of(struct gs_machine *m, int gpu, uint64_t cgroup);
struct gs_memory_limit *gs_new_memory_limit(struct gs_machine *m, int gpu, const char *cgroup);

// gs_used_within is what the processes of the limit's cgroup have of its GPU: those that
// cgroup.procs lists for the caller, and so none of cgroups below it.
uint64_t gs_used_within(const struct gs_machine *m, const struct gs_memory_limit *l);

// gs_memory_left is how much more of a GPU's memory the hard limit of its cgroup leaves a process.
uint64_t gs_memory_left(const struct gs_machine *m, int gpu, int pid);

// Small helpers that several files need.
int32_t gs_bounded(int32_t count, int32_t limit);
int gs_is_char_device(const char *path);
int gs_join(char *out, size_t size, const char *dir, const char *name);

#endif
