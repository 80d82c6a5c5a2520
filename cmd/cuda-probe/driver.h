// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef PARTAGE_CUDA_DRIVER_H
#define PARTAGE_CUDA_DRIVER_H

#include <stddef.h>

// The functions, by the names and signatures of cuda.h; a CUresult is an int.
struct driver {
	int (*init)(unsigned int);
	int (*count)(int *);
	int (*get)(int *, int);
	int (*uuid)(unsigned char *, int);
	int (*total)(size_t *, int);
	int (*attribute)(int *, int, int);
	int (*create)(void **, unsigned int, int);
	int (*allocate)(unsigned long long *, size_t);
	int (*memory)(size_t *, size_t *);
	int (*fill)(unsigned long long, unsigned char, size_t);
	int (*synchronize)(void);
	int (*error_name)(int, const char **);
	int (*destroy)(void *);
	int (*affinity)(void *, int); // NULL before CUDA 11.4
	void *context;
};

// driver_load returns what is wrong, or NULL.
const char *driver_load(const char *library, struct driver *d);

int driver_init(const struct driver *d);
int driver_count(const struct driver *d, int *count);
int driver_get(const struct driver *d, int *device, int ordinal);
int driver_uuid(const struct driver *d, unsigned char *uuid, int device);
int driver_total(const struct driver *d, size_t *bytes, int device);
int driver_multiprocessors(const struct driver *d, int *count, int device);
int driver_context(struct driver *d, int device);
int driver_destroy(struct driver *d);
int driver_affinity(const struct driver *d, unsigned int *multiprocessors);
int driver_memory(const struct driver *d, size_t *available, size_t *total);
int driver_allocate(const struct driver *d, unsigned long long *address, size_t bytes);
int driver_fill(const struct driver *d, unsigned long long address, size_t bytes);
int driver_synchronize(const struct driver *d);
const char *driver_error_name(const struct driver *d, int code);

#endif
