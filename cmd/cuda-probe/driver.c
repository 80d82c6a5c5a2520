// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>

// find looks a function up by its newest name that has this signature. Go never
// unloads the library: a driver does not bear that while it has threads.
static void *find(void *library, const char *name, const char *older, const char **missing)
{
	void *found = dlsym(library, name);
	if (found == NULL && older != NULL)
		found = dlsym(library, older);
	if (found == NULL && *missing == NULL)
		*missing = name;
	return found;
}

const char *driver_load(const char *library, struct driver *d)
{
	static char problem[256];
	const char *missing = NULL;
	void *l = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (l == NULL)
		return dlerror();
	d->init = find(l, "cuInit", NULL, &missing);
	d->count = find(l, "cuDeviceGetCount", NULL, &missing);
	d->get = find(l, "cuDeviceGet", NULL, &missing);
	// The first version gives a MIG device the UUID of its GPU.
	d->uuid = find(l, "cuDeviceGetUuid_v2", "cuDeviceGetUuid", &missing);
	d->total = find(l, "cuDeviceTotalMem_v2", NULL, &missing);
	d->attribute = find(l, "cuDeviceGetAttribute", NULL, &missing);
	d->create = find(l, "cuCtxCreate_v2", NULL, &missing);
	d->destroy = find(l, "cuCtxDestroy_v2", NULL, &missing);
	d->allocate = find(l, "cuMemAlloc_v2", NULL, &missing);
	d->memory = find(l, "cuMemGetInfo_v2", NULL, &missing);
	d->fill = find(l, "cuMemsetD8_v2", NULL, &missing);
	d->synchronize = find(l, "cuCtxSynchronize", NULL, &missing);
	d->error_name = find(l, "cuGetErrorName", NULL, &missing);
	d->affinity = dlsym(l, "cuCtxGetExecAffinity");
	if (missing == NULL)
		return NULL;
	snprintf(problem, sizeof(problem), "%s has no %s", library, missing);
	return problem;
}

int driver_init(const struct driver *d)
{
	return d->init(0);
}

int driver_count(const struct driver *d, int *count)
{
	return d->count(count);
}

int driver_get(const struct driver *d, int *device, int ordinal)
{
	return d->get(device, ordinal);
}

int driver_uuid(const struct driver *d, unsigned char *uuid, int device)
{
	return d->uuid(uuid, device);
}

int driver_total(const struct driver *d, size_t *bytes, int device)
{
	return d->total(bytes, device);
}

enum { MULTIPROCESSOR_COUNT = 16 }; // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

int driver_multiprocessors(const struct driver *d, int *count, int device)
{
	return d->attribute(count, MULTIPROCESSOR_COUNT, device);
}

int driver_context(struct driver *d, int device)
{
	return d->create(&d->context, 0, device);
}

int driver_destroy(struct driver *d)
{
	return d->destroy(d->context);
}

// driver_affinity reads a CUexecAffinityParam of the type SM_COUNT: the type, and
// a union of which this type uses the first number.
int driver_affinity(const struct driver *d, unsigned int *multiprocessors)
{
	struct {
		int type;
		unsigned int count;
		unsigned int room[8];
	} parameter = {0, 0, {0}};
	if (d->affinity == NULL)
		return 1;
	int result = d->affinity(&parameter, 0); // CU_EXEC_AFFINITY_TYPE_SM_COUNT
	*multiprocessors = parameter.count;
	return result;
}

int driver_memory(const struct driver *d, size_t *available, size_t *total)
{
	return d->memory(available, total);
}

int driver_allocate(const struct driver *d, unsigned long long *address, size_t bytes)
{
	return d->allocate(address, bytes);
}

int driver_fill(const struct driver *d, unsigned long long address, size_t bytes)
{
	return d->fill(address, 0, bytes);
}

int driver_synchronize(const struct driver *d)
{
	return d->synchronize();
}

const char *driver_error_name(const struct driver *d, int code)
{
	const char *name = NULL;
	return d->error_name(code, &name) == 0 ? name : NULL;
}
