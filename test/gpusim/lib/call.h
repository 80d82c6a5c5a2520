// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What every exported function does around its model: CALL defines the
// function, which asks call_begins what happens to this call. gen writes a CALL
// for each function of nvml.h, so none can be forgotten.

#ifndef GPUSIM_CALL_H
#define GPUSIM_CALL_H

#include <nvml.h>
#include <stddef.h>

// find gives the GPU that a call is on, an index into the machine's GPUs, or -1.
// It runs between enter and leave.
typedef int (*find_fn)(const void *key);

struct call {
	const char *function;
	find_fn find; // NULL: calls of this function are on no GPU
	const void *key;
	nvmlReturn_t result;
	struct verdict *verdict; // NULL: nothing happens to this call
};

// call_begins reports whether the model is to run. Else the result is there. It
// may take long, or kill the process. call_ends must follow.
int call_begins(struct call *call);
void call_ends(struct call *call);

// unmodelled is the model of functions that have none.
nvmlReturn_t unmodelled(const char *function);

int gpu_of_handle(const void *handle);
int gpu_of_index(const void *index);
int gpu_of_uuid(const void *uuid);
int gpu_of_typed_uuid(const void *uuid);
int gpu_of_serial(const void *serial);
int gpu_of_bus_id(const void *bus_id);
int gpu_of_event_set(const void *handle);

// CALL defines the exported function, and a model for the case that there is no
// other, which has the weaker definition.
#define CALL(name, parameters, arguments, finder, finder_key)                                  \
	__attribute__((weak)) nvmlReturn_t model_##name parameters                             \
	{                                                                                      \
		return unmodelled(#name);                                                      \
	}                                                                                      \
	nvmlReturn_t name parameters                                                           \
	{                                                                                      \
		struct call call = {.function = #name, .find = finder, .key = finder_key};     \
		if (call_begins(&call))                                                        \
			call.result = model_##name arguments;                                  \
		call_ends(&call);                                                              \
		return call.result;                                                            \
	}

#endif
