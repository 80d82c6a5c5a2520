// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// A library that holds programs to a limit of memory, as an administrator may provide one: it is what the driver promises to such
// libraries, and no more. It counts in the file that CUDA_DEVICE_MEMORY_SHARED_CACHE names, under a lock in /tmp/vgpulock, what all
// programs of a claim have allocated together, and refuses what would be more than CUDA_DEVICE_MEMORY_LIMIT. Only for tests: it knows two
// calls, and what a program took is counted for as long as the claim has the file.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, OPERATING_SYSTEM = 304 }; // from cuda.h

typedef int alloc_call(unsigned long long *, size_t);
typedef int memory_call(size_t *, size_t *);

static alloc_call *driver_alloc;
static memory_call *driver_memory;
static uint64_t limit;		// 0: none
static uint64_t *used;		// by all programs of the claim
static int lock = -1;

static void fail(const char *what)
{
	perror(what);
	_exit(97);
}

// open_shared opens a file that other programs of the claim, of whatever users, share.
static int open_shared(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0)
		fail(path);
	fchmod(fd, 0666); // past the umask; refused where another user has made it
	return fd;
}

__attribute__((constructor)) static void start(void)
{
	const char *text = getenv("CUDA_DEVICE_MEMORY_LIMIT"), *cache = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
	char *unit;
	if (text == NULL || cache == NULL)
		return;
	limit = strtoull(text, &unit, 10) << 20;
	if (strcmp(unit, "m") != 0)
		fail("CUDA_DEVICE_MEMORY_LIMIT is not in MiB");
	int fd = open_shared(cache);
	if (ftruncate(fd, sizeof(*used)) != 0)
		fail(cache);
	used = mmap(NULL, sizeof(*used), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (used == MAP_FAILED)
		fail(cache);
	close(fd);
	lock = open_shared("/tmp/vgpulock/lock");
}

static int limited_alloc(unsigned long long *address, size_t bytes)
{
	int result = OUT_OF_MEMORY;
	if (used == NULL)
		return driver_alloc(address, bytes);
	if (flock(lock, LOCK_EX) != 0)
		return OPERATING_SYSTEM;
	if (__atomic_load_n(used, __ATOMIC_SEQ_CST) + bytes <= limit)
		result = driver_alloc(address, bytes);
	if (result == SUCCESS)
		__atomic_add_fetch(used, bytes, __ATOMIC_SEQ_CST);
	flock(lock, LOCK_UN);
	return result;
}

static int limited_memory(size_t *available, size_t *total)
{
	int result = driver_memory(available, total);
	if (result == SUCCESS && used != NULL) {
		uint64_t taken = __atomic_load_n(used, __ATOMIC_SEQ_CST);
		*total = limit;
		*available = taken < limit ? limit - taken : 0;
	}
	return result;
}

// dlsym is how programs find the driver's calls, since they load the driver when they run.
__attribute__((visibility("default"))) void *dlsym(void *library, const char *name)
{
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
	void *(*real)(void *, const char *) = NULL;
	for (size_t i = 0; i < sizeof(versions) / sizeof(*versions) && real == NULL; i++)
		real = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
	if (real == NULL)
		fail("the C library has no dlsym that this library knows");
	void *found = real(library, name);
	if (found != NULL && strcmp(name, "cuMemAlloc_v2") == 0) {
		driver_alloc = (alloc_call *)found;
		return (void *)limited_alloc;
	}
	if (found != NULL && strcmp(name, "cuMemGetInfo_v2") == 0) {
		driver_memory = (memory_call *)found;
		return (void *)limited_memory;
	}
	return found;
}
