// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // F_OFD_SETLKW
#endif

#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define STATE_SUFFIX "/var/lib/gpusim/state"

const char *gs_strerror(int err)
{
	switch (err) {
	case GS_ELAYOUT:
		return "the file was written by another version of the simulator; make the machine again";
	case GS_EMAGIC:
		return "not a gpusim state file";
	}
	return strerror(err);
}

int32_t gs_bounded(int32_t count, int32_t limit)
{
	if (count < 0)
		return 0;
	return count < limit ? count : limit;
}

// used is how much of a machine has content.
static size_t used(const struct gs_machine *m)
{
	return offsetof(struct gs_machine, gpus) +
	       (size_t)gs_bounded(m->gpu_count, GS_MAX_GPUS) * sizeof(struct gs_gpu);
}

int gs_create(const char *path, const struct gs_machine *m)
{
	char temporary[GS_PATH];
	int n = snprintf(temporary, sizeof(temporary), "%s.XXXXXX", path);
	if (n < 0 || (size_t)n >= sizeof(temporary))
		return ENAMETOOLONG;
	int fd = mkostemp(temporary, O_CLOEXEC);
	if (fd < 0)
		return errno;

	int err = 0;
	struct gs_file *f = MAP_FAILED;
	// 0644: containers of any user read it, only root changes the machine.
	if (fchmod(fd, 0644) != 0 || ftruncate(fd, sizeof(struct gs_file)) != 0) {
		err = errno;
	} else {
		f = mmap(NULL, sizeof(struct gs_file), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (f == MAP_FAILED)
			err = errno;
	}
	if (err == 0) {
		memcpy(f->magic, GS_MAGIC, sizeof(f->magic));
		f->layout_version = GS_LAYOUT_VERSION;
		f->size = sizeof(*f);
		memcpy(&f->slot[1], m, used(m));
		atomic_store(&f->generation, 1);
		munmap(f, sizeof(*f));
		if (rename(temporary, path) != 0)
			err = errno;
	}
	close(fd);
	if (err != 0)
		unlink(temporary);
	return err;
}

// where_capabilities fills h->capabilities from the state's own path.
static void where_capabilities(const char *path, struct gs_handle *h)
{
	size_t length = strlen(path), suffix = strlen(STATE_SUFFIX);
	h->capabilities[0] = '\0';
	if (length < suffix || strcmp(path + length - suffix, STATE_SUFFIX) != 0)
		return;
	size_t folder = length - strlen("/state");
	int n = snprintf(h->capabilities, sizeof(h->capabilities), "%.*s/proc/driver/nvidia/capabilities",
			 (int)folder, path);
	if (n < 0 || (size_t)n >= sizeof(h->capabilities))
		h->capabilities[0] = '\0';
}

int gs_open(const char *path, struct gs_handle *h)
{
	memset(h, 0, sizeof(*h));
	h->writable = 1;
	h->fd = open(path, O_RDWR | O_CLOEXEC);
	if (h->fd < 0 && (errno == EACCES || errno == EROFS || errno == EPERM)) {
		h->writable = 0;
		h->fd = open(path, O_RDONLY | O_CLOEXEC);
	}
	if (h->fd < 0)
		return errno;

	int err = 0;
	// The header is checked before the whole is mapped, so that a short or
	// foreign file gives an error and not a bus error later.
	struct {
		char magic[8];
		uint32_t layout_version;
		uint32_t unused;
		uint64_t size;
	} header;
	if (pread(h->fd, &header, sizeof(header), 0) != (ssize_t)sizeof(header) ||
	    memcmp(header.magic, GS_MAGIC, sizeof(header.magic)) != 0)
		err = GS_EMAGIC;
	else if (header.layout_version != GS_LAYOUT_VERSION || header.size != sizeof(struct gs_file) ||
		 lseek(h->fd, 0, SEEK_END) < (off_t)sizeof(struct gs_file))
		err = GS_ELAYOUT;
	if (err == 0) {
		int protection = h->writable ? PROT_READ | PROT_WRITE : PROT_READ;
		h->file = mmap(NULL, sizeof(struct gs_file), protection, MAP_SHARED, h->fd, 0);
		if (h->file == MAP_FAILED)
			err = errno;
	}
	if (err != 0) {
		close(h->fd);
		memset(h, 0, sizeof(*h));
		h->fd = -1;
		return err;
	}
	where_capabilities(path, h);
	return 0;
}

void gs_close(struct gs_handle *h)
{
	if (h->file == NULL)
		return;
	munmap(h->file, sizeof(struct gs_file));
	close(h->fd); // also lets go of the lock
	memset(h, 0, sizeof(*h));
	h->fd = -1;
}

uint64_t gs_generation(const struct gs_handle *h)
{
	return atomic_load_explicit(&h->file->generation, memory_order_acquire);
}

uint64_t gs_read(const struct gs_handle *h, struct gs_machine *out)
{
	for (;;) {
		uint64_t before = gs_generation(h);
		const struct gs_machine *slot = &h->file->slot[before % 2];
		memcpy(out, slot, used(slot));
		// The slot in use is never written. If the generation did not move
		// while we copied, it was in use all the time.
		atomic_thread_fence(memory_order_acquire);
		if (atomic_load_explicit(&h->file->generation, memory_order_relaxed) == before)
			return before;
	}
}

// Bytes of the file that stand for what is locked: the machine, each GPU, and all of them.
enum { LOCK_MACHINE = 0, LOCK_FIRST_GPU = 1, LOCK_ALL_GPUS = LOCK_FIRST_GPU + GS_MAX_GPUS };

static int lock_byte(struct gs_handle *h, int byte, short type)
{
	if (!h->writable && type == F_WRLCK)
		return EROFS;
	// An OFD lock belongs to this open file, and the kernel drops it when the
	// process dies.
	struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
	while (fcntl(h->fd, F_OFD_SETLKW, &l) != 0) {
		if (errno != EINTR)
			return errno;
	}
	return 0;
}

int gs_lock_gpu(struct gs_handle *h, int gpu)
{
	return lock_byte(h, LOCK_FIRST_GPU + gpu, F_WRLCK);
}

int gs_lock_all_gpus(struct gs_handle *h, int hold)
{
	return lock_byte(h, LOCK_ALL_GPUS, hold ? F_WRLCK : F_RDLCK);
}

static int lock(struct gs_handle *h)
{
	int err = lock_byte(h, LOCK_MACHINE, F_WRLCK);
	h->locked = err == 0;
	return err;
}

static void unlock(struct gs_handle *h)
{
	struct flock l = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = LOCK_MACHINE, .l_len = 1};
	h->next = NULL;
	h->locked = 0;
	fcntl(h->fd, F_OFD_SETLK, &l);
}

static int sound(const struct gs_handle *h)
{
	return h->capabilities[0] == '\0' ||
	       atomic_load(&h->file->capabilities) == atomic_load(&h->file->generation);
}

// resync makes the capability files show the machine in use. Needs the lock.
static int resync(struct gs_handle *h)
{
	uint64_t generation = gs_generation(h);
	atomic_store(&h->file->capabilities, 0);
	int err = gs_capabilities_follow(h->capabilities, NULL, &h->file->slot[generation % 2]);
	if (err == 0)
		atomic_store(&h->file->capabilities, generation);
	return err;
}

int gs_begin(struct gs_handle *h)
{
	int err = lock(h);
	if (err != 0)
		return err;
	if (!sound(h) && (err = resync(h)) != 0) {
		unlock(h);
		return err;
	}
	uint64_t generation = gs_generation(h);
	const struct gs_machine *current = &h->file->slot[generation % 2];
	h->next = &h->file->slot[(generation + 1) % 2];
	// A reader may still be copying this slot. It must see the generation that
	// retired the slot no later than what is written into it now.
	atomic_thread_fence(memory_order_seq_cst);
	memcpy(h->next, current, used(current));
	gs_drop_dead(h, h->next);
	gs_add_holders(h, h->next);
	return 0;
}

// start_counts begins the counts of faults that the machine in use does not have.
static void start_counts(struct gs_handle *h, const struct gs_machine *current)
{
	for (int i = 0; i < gs_bounded(h->next->fault_count, GS_MAX_FAULTS); i++)
		if (h->next->faults[i].serial >= current->next_fault)
			gs_fault_start(h, h->next->faults[i].serial);
}

int gs_commit(struct gs_handle *h)
{
	uint64_t generation = gs_generation(h);
	int err = 0;
	start_counts(h, &h->file->slot[generation % 2]);
	if (h->capabilities[0] != '\0') {
		// Files first: who sees an instance finds its files. A writer that
		// dies from here on leaves 0, and the next one repairs.
		atomic_store(&h->file->capabilities, 0);
		err = gs_capabilities_follow(h->capabilities, &h->file->slot[generation % 2], h->next);
	}
	if (err == 0) {
		atomic_store_explicit(&h->file->generation, generation + 1, memory_order_release);
		if (h->capabilities[0] != '\0')
			atomic_store(&h->file->capabilities, generation + 1);
		gs_wake(h);
	} else {
		(void)resync(h); // back to the machine that stays; if that fails too, 0 remains
	}
	unlock(h);
	return err;
}

void gs_abort(struct gs_handle *h)
{
	if (h->locked)
		unlock(h);
}

int gs_repair(struct gs_handle *h)
{
	if (!h->writable || sound(h))
		return 0;
	int err = gs_begin(h);
	if (err == 0)
		gs_abort(h);
	return err;
}

int gs_sync_capabilities(struct gs_handle *h)
{
	if (h->capabilities[0] == '\0')
		return 0;
	int err = lock(h);
	if (err != 0)
		return err;
	err = resync(h);
	unlock(h);
	return err;
}
