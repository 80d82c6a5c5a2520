// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What the library's files share. The model of a function works like this: ENTER
// takes the process's lock and refreshes the view, a private copy of the
// machine; target_… turns the caller's handle into pointers into the view; the
// function reads them. A function that changes something runs its body through
// change(), on the copy that is committed for all processes.

#ifndef GPUSIM_LIB_H
#define GPUSIM_LIB_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

// models.h, which gen writes, renames all functions of nvml.h to model_…: what
// these files define under NVML's names are the models that call.h wraps.
#include "models.h"

#include <nvml.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "call.h"
#include "state.h"

// ENTER must be the first statement of a model.
#define ENTER()                                                      \
	__attribute__((cleanup(leave))) int entered = enter();       \
	if (!entered)                                                \
	return NVML_ERROR_UNINITIALIZED

int enter(void);
void leave(const int *entered);

// view is the machine as of the last ENTER. It is valid until the function
// returns.
extern struct gs_machine view;

// consult runs fn with the state, the machine and the state's path, as of now.
// Before nvmlInit, it does so for nvmlInit only, and else nothing.
typedef void (*consult_fn)(struct call *call, struct gs_handle *h, const struct gs_machine *m, const char *path);
void consult(consult_fn fn, struct call *call);

// change runs body on the machine under the writer lock of all processes, and
// commits it if body returns NVML_SUCCESS.
typedef nvmlReturn_t (*change_fn)(struct gs_machine *m, void *arg);
nvmlReturn_t change(change_fn body, void *arg);

// open_again opens the state for a caller that waits without the process's lock.
nvmlReturn_t open_again(struct gs_handle *h);

// driver_major is 580 of "580.95.05". RECOVERY_DRIVER is the first that says what a GPU
// needs to recover, which is assumed.
enum { RECOVERY_DRIVER = 570 };
int driver_major(void);

// driver_manages_memory: the GPU is coherent with the CPU, and the kernel has no NUMA node of
// its memory (machine.DriverManagesMemory).
int driver_manages_memory(const struct gs_gpu *gpu);

// may_administrate: root, with the state writable. may_configure: root, with
// the capability to configure MIG, which lists and creates instances.
int may_administrate(void);
int may_configure(void);

// What this process can see; gpu_at is the index-th visible GPU or -1.
int gpu_visible(int gpu);
int gpu_at(unsigned int index);
int instance_visible(const struct gs_gpu *gpu, const struct gs_instance *in, const struct gs_compute *ci);

// A target is what a handle stands for, in one machine.
struct target {
	int index; // into the machine's GPUs
	struct gs_gpu *gpu;
	struct gs_instance *in; // NULL: the GPU itself
	struct gs_compute *ci;  // NULL: the GPU or a GPU instance
	const struct gs_profile *profile;
};

// target_device takes GPUs and MIG devices, target_gpu only the former and
// target_mig only the latter. INVALID_ARGUMENT for anything else, and for what
// was destroyed since.
nvmlReturn_t target_device(struct gs_machine *m, nvmlDevice_t d, struct target *t);
nvmlReturn_t target_gpu(struct gs_machine *m, nvmlDevice_t d, struct target *t);
nvmlReturn_t target_mig(struct gs_machine *m, nvmlDevice_t d, struct target *t);
nvmlReturn_t target_instance(struct gs_machine *m, nvmlGpuInstance_t g, struct target *t);
nvmlReturn_t target_compute(struct gs_machine *m, nvmlComputeInstance_t c, struct target *t);

nvmlDevice_t gpu_handle(int gpu);
nvmlDevice_t mig_handle(int gpu, const struct gs_instance *in, const struct gs_compute *ci);
nvmlGpuInstance_t instance_handle(int gpu, const struct gs_instance *in);
nvmlComputeInstance_t compute_handle(int gpu, const struct gs_instance *in, const struct gs_compute *ci);

// Look-ups in a machine; NULL if there is none.
const struct gs_profile *profile_by_id(const struct gs_gpu *gpu, uint32_t id);
const struct gs_profile *profile_by_enum(const struct gs_gpu *gpu, uint32_t enumeration);
const struct gs_ci_profile *ci_profile_by_id(const struct gs_profile *p, uint32_t id);
struct gs_instance *instance_by_id(struct gs_gpu *gpu, uint32_t id);
struct gs_compute *compute_by_id(struct gs_instance *in, uint32_t id);

// held reports whether a process holds the GPU (instance and compute -1: anything
// of it), a GPU instance (compute -1), or a compute instance.
int held(const struct gs_machine *m, int gpu, int instance, int compute);
// computes reports whether a process has a context on the GPU, and so channels and memory: it does
// more than to have the GPU open.
int computes(const struct gs_machine *m, int gpu);
// add_holders lets the view have the processes that hold something without the right to
// say so in the file.
void add_holders(void);
uint64_t memory_in_use(const struct gs_machine *m, int gpu, int instance);
// on_target reports whether a process is on the GPU, GPU instance or MIG device.
int on_target(const struct gs_process *p, const struct target *t);
// nvlink_field is the value of a field about the traffic on a GPU's NVLinks.
nvmlReturn_t nvlink_field(const struct gs_gpu *gpu, nvmlFieldValue_t *v);

// utilization is how busy all processes keep the multiprocessors of a target, in percent.
unsigned int utilization(const struct target *t);

// copy_text copies a string with NVML's rules for a caller's buffer.
nvmlReturn_t copy_text(char *out, unsigned int length, const char *text);

// "MIG 1g.10gb", "MIG 1c.3g.40gb" where the compute instance has less than the
// GPU instance.
void profile_name(char *out, size_t size, const struct gs_profile *p, int compute_slices);

// fill_pci fills in an address, unless it is none. Old callers have a structure that ends before
// busId: with_bus_id is 0 for them.
int fill_pci(const char *address, nvmlPciInfo_t *pci, int with_bus_id);

// compute_uuid is the UUID of the MIG device of a compute instance at a place in a GPU instance. As
// NVIDIA's driver makes it, it follows from where that is: what is made there again has the same.
void compute_uuid(char *out, size_t size, const struct gs_gpu *gpu, const struct gs_instance *in, struct gs_placement at);

#endif
