// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What the files of the simulated libcuda share. The rules are those of the Go
// packages cuda and mps beside this folder, which cuda-client uses; the tests of
// cmd/cuda-probe hold the two together.

#ifndef GPUSIM_CUDA_H
#define GPUSIM_CUDA_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stddef.h>
#include <stdint.h>

#include "state.h"

// Results, from cuda.h.
enum result {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	DEVICE_UNAVAILABLE = 46,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	OPERATING_SYSTEM = 304,
	SYSTEM_NOT_READY = 802,
	MPS_CONNECTION_FAILED = 805,
	MPS_RPC_FAILURE = 806,
};

enum { MAX_DEVICES = GS_MAX_GPUS * GS_MAX_INSTANCES };

// device is what CUDA numbers from 0: a GPU, or a compute instance of one.
struct device {
	char uuid[GS_NAME]; // "GPU-…" or "MIG-…"
	char name[GS_LONG_NAME + GS_NAME];
	int gpu, instance, compute; // the latter two are -1 for a GPU
	int minor;
	int mode; // nvmlComputeMode_t
	int sms;
	int major; // of the compute capability
	uint64_t memory;
	uint64_t context_memory; // of each context

	double percentage; // of the multiprocessors
	uint64_t limit;	   // of the memory; 0: none
	int contexts;
	uint64_t used; // by this program, beside its contexts
};

// program is this process.
struct program {
	struct gs_handle state;
	struct gs_paths paths;
	struct gs_machine machine; // as of the last look
	struct device devices[MAX_DEVICES];
	int count;
	int server; // socket of the MPS server, or -1
	int void_limits; // its variable voids all limits of memory, the server's too
	int ended;	 // why the contexts are no good any more, or 0
};

// look refreshes p->machine.
void look(struct program *p);

// find_devices fills the devices that a program sees: of all devices whose nodes
// are here, those that CUDA_VISIBLE_DEVICES names. Of an MPS client's, those are
// numbered as the server does, whose UUIDs served are.
void find_devices(struct program *p, const char *const *served, int served_count);

// used is how much of the device's memory is in use, by all that are in the
// machine.
uint64_t used(const struct gs_machine *m, const struct device *d);

// mps_connect makes the program a client of the MPS daemon, if one can be
// reached: *reached says so.
enum result mps_connect(struct program *p, int *reached);
enum result mps_context(struct program *p, int device);
enum result mps_alloc(struct program *p, int device, uint64_t bytes);
enum result mps_launch(struct program *p, int device);
enum result mps_synchronize(struct program *p, int device);
enum result mps_memory(struct program *p, int device, uint64_t *available, uint64_t *total);

// The same without MPS.
enum result direct_context(struct program *p, int device);
enum result direct_alloc(struct program *p, int device, uint64_t bytes);
enum result direct_memory(struct program *p, int device, uint64_t *available, uint64_t *total);

#endif
