// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The part of libcuda.so.1 that programs need to find their devices, make a
// context and take memory. It runs nothing. What is not here is not exported.

#include "cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "self.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct context *CUcontext;
typedef unsigned long long CUdeviceptr;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct program *program; // NULL before cuInit
static int current = -1;	// device of the current context
static CUdeviceptr next_address = 0x700000000000;

static void unlock(pthread_mutex_t **m)
{
	pthread_mutex_unlock(*m);
}

#define ENTER()                                                               \
	__attribute__((cleanup(unlock))) pthread_mutex_t *held = &mutex;      \
	pthread_mutex_lock(held);                                             \
	if (program == NULL)                                                  \
	return NOT_INITIALIZED

// fabric_joined fails as long as an undivided GPU waits for its NVLink fabric.
static enum result fabric_joined(const struct program *p)
{
	enum { NOT_STARTED = 1, IN_PROGRESS = 2 }; // nvmlGpuFabricState_t
	for (int i = 0; i < p->count; i++) {
		int state = p->machine.gpus[p->devices[i].gpu].health.fabric_state;
		if (p->devices[i].instance < 0 && (state == NOT_STARTED || state == IN_PROGRESS))
			return SYSTEM_NOT_READY;
	}
	return SUCCESS;
}

static enum result start(struct program *p)
{
	int reached = 0;
	if (gs_find_for_library(&p->paths) != 0 || gs_open(p->paths.state, &p->state) != 0)
		return NO_DEVICE;
	look(p);
	enum result r = mps_connect(p, &reached);
	if (reached)
		return r == SUCCESS ? fabric_joined(p) : r;
	find_devices(p, NULL, 0);
	return p->count > 0 ? fabric_joined(p) : NO_DEVICE;
}

// lost reports whether the program's /proc is not that of its PID namespace, where it cannot
// find itself: cuInit fails then (seen on an H100 with driver 580).
static int lost(void)
{
	char text[16];
	ssize_t n = readlink("/proc/self", text, sizeof(text) - 1);
	if (n < 0)
		return 1;
	text[n] = 0;
	return atoi(text) != getpid();
}

EXPORT int cuInit(unsigned int flags);
EXPORT int cuInit(unsigned int flags)
{
	__attribute__((cleanup(unlock))) pthread_mutex_t *held = &mutex;
	pthread_mutex_lock(held);
	if (flags != 0)
		return INVALID_VALUE;
	if (program != NULL)
		return SUCCESS;
	if (lost())
		return OPERATING_SYSTEM;
	struct program *p = calloc(1, sizeof(*p));
	if (p == NULL)
		return OUT_OF_MEMORY;
	enum result r = start(p);
	if (r != SUCCESS) {
		gs_close(&p->state);
		free(p);
		return r;
	}
	program = p;
	return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version);
EXPORT int cuDriverGetVersion(int *version)
{
	if (version == NULL)
		return INVALID_VALUE;
	*version = program != NULL ? program->machine.cuda_driver_version : 13000; // CUDA 13.0
	return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuDeviceGetCount(int *count)
{
	ENTER();
	*count = program->count;
	return SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal);
EXPORT int cuDeviceGet(int *device, int ordinal)
{
	ENTER();
	if (ordinal < 0 || ordinal >= program->count)
		return INVALID_DEVICE;
	*device = ordinal;
	return SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int length, int device);
EXPORT int cuDeviceGetName(char *name, int length, int device)
{
	ENTER();
	if (device < 0 || device >= program->count)
		return INVALID_DEVICE;
	snprintf(name, (size_t)length, "%s", program->devices[device].name);
	return SUCCESS;
}

// cuDeviceGetUuid_v2 gives a MIG device's own UUID, and has no older version here.
EXPORT int cuDeviceGetUuid_v2(unsigned char uuid[16], int device);
EXPORT int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)
{
	ENTER();
	if (device < 0 || device >= program->count)
		return INVALID_DEVICE;
	const char *at = program->devices[device].uuid + strlen("GPU-");
	for (int i = 0; i < 16; i++, at += 2) {
		unsigned int byte = 0;
		at += *at == '-';
		if (sscanf(at, "%2x", &byte) != 1)
			return INVALID_VALUE;
		uuid[i] = (unsigned char)byte;
	}
	return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device);
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	ENTER();
	if (device < 0 || device >= program->count)
		return INVALID_DEVICE;
	*bytes = program->devices[device].memory;
	return SUCCESS;
}

enum { PER_TPC = 2 };		    // multiprocessors, see package cuda
enum { MULTIPROCESSOR_COUNT = 16 }; // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

// multiprocessors are those that the program may use: whole TPCs, and some at least.
static int multiprocessors(const struct device *d)
{
	int sms = (int)((double)d->sms * d->percentage / 100) / PER_TPC * PER_TPC;
	int fewest = d->major >= 9 ? 8 : d->major == 8 ? 4 : PER_TPC;
	if (sms < fewest)
		sms = fewest;
	return sms < d->sms ? sms : d->sms;
}

EXPORT int cuDeviceGetAttribute(int *out, int attribute, int device);
EXPORT int cuDeviceGetAttribute(int *out, int attribute, int device)
{
	ENTER();
	if (device < 0 || device >= program->count)
		return INVALID_DEVICE;
	if (attribute != MULTIPROCESSOR_COUNT)
		return INVALID_VALUE;
	*out = multiprocessors(&program->devices[device]);
	return SUCCESS;
}

EXPORT int cuCtxCreate_v2(CUcontext *context, unsigned int flags, int device);
EXPORT int cuCtxCreate_v2(CUcontext *context, unsigned int flags, int device)
{
	ENTER();
	if (context == NULL || flags != 0)
		return INVALID_VALUE;
	if (device < 0 || device >= program->count)
		return INVALID_DEVICE;
	enum result r = program->server >= 0 ? mps_context(program, device) : direct_context(program, device);
	if (r != SUCCESS)
		return r;
	current = device;
	*context = (CUcontext)&program->devices[device];
	return SUCCESS;
}

// cuCtxDestroy_v2 ends the use of the context. What it holds goes with the process.
EXPORT int cuCtxDestroy_v2(CUcontext context);
EXPORT int cuCtxDestroy_v2(CUcontext context)
{
	ENTER();
	if (current < 0 || context != (CUcontext)&program->devices[current])
		return INVALID_CONTEXT;
	current = -1;
	return SUCCESS;
}

EXPORT int cuMemAlloc_v2(CUdeviceptr *out, size_t bytes);
EXPORT int cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
	ENTER();
	if (current < 0)
		return INVALID_CONTEXT;
	if (out == NULL || bytes == 0)
		return INVALID_VALUE;
	enum result r = program->server >= 0 ? mps_alloc(program, current, bytes) : direct_alloc(program, current, bytes);
	if (r == SUCCESS)
		*out = next_address += bytes;
	return r;
}

// cuMemGetInfo_v2: a limit bounds what is free, the total stays the device's.
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total);
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total)
{
	ENTER();
	if (current < 0)
		return INVALID_CONTEXT;
	uint64_t left = 0, all = 0;
	enum result r = program->server >= 0 ? mps_memory(program, current, &left, &all)
					     : direct_memory(program, current, &left, &all);
	*available = left;
	*total = all;
	return r;
}

EXPORT int cuCtxSynchronize(void);
EXPORT int cuCtxSynchronize(void)
{
	ENTER();
	if (current < 0)
		return INVALID_CONTEXT;
	return program->server < 0 ? SUCCESS : mps_synchronize(program, current);
}

// cuMemsetD8_v2 stands for work that goes on until the context is synchronised. It
// changes nothing.
EXPORT int cuMemsetD8_v2(CUdeviceptr address, unsigned char byte, size_t bytes);
EXPORT int cuMemsetD8_v2(CUdeviceptr address, unsigned char byte, size_t bytes)
{
	(void)address;
	(void)byte;
	(void)bytes;
	ENTER();
	if (current < 0)
		return INVALID_CONTEXT;
	return program->server < 0 ? SUCCESS : mps_launch(program, current);
}

static const struct {
	enum result code;
	const char *name;
} names[] = {
	{SUCCESS, "CUDA_SUCCESS"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
	{DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
	{NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
	{719, "CUDA_ERROR_LAUNCH_FAILED"},
	{OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"},
	{SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY"},
	{MPS_CONNECTION_FAILED, "CUDA_ERROR_MPS_CONNECTION_FAILED"},
	{MPS_RPC_FAILURE, "CUDA_ERROR_MPS_RPC_FAILURE"},
	{807, "CUDA_ERROR_MPS_SERVER_NOT_READY"},
	{808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"},
	{810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"},
	{999, "CUDA_ERROR_UNKNOWN"},
};

EXPORT int cuGetErrorName(int code, const char **name);
EXPORT int cuGetErrorName(int code, const char **name)
{
	*name = NULL;
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if ((int)names[i].code == code)
			*name = names[i].name;
	return *name == NULL ? INVALID_VALUE : SUCCESS;
}
