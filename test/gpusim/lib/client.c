// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// This process's side of the machine: initialisation, the view, what is
// visible, and changes.

#include "lib.h"
#include "wait.h"
#include "self.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned int references; // nvmlInit calls without their nvmlShutdown
static struct gs_handle state = {.fd = -1};
static struct gs_paths paths;
static uint64_t viewed; // generation of the view
static uint32_t visible; // bit per GPU

struct gs_machine view;

// report says on standard error what a return code cannot.
static void report(const char *what, const char *path, int err)
{
	fprintf(stderr, "gpusim: %s %s: %s\n", what, path, gs_strerror(err));
}

// find_host makes paths.root the host's, where the library lies in the root of a driver
// container: the state is reached through a link then.
static int find_host(struct gs_paths *p)
{
	char *state = realpath(p->state, NULL);
	char host[GS_PATH];
	int elsewhere = state != NULL && gs_root_of_state(state, host) == 0 && strcmp(host, p->root) != 0 &&
			gs_is_link(p->root, GS_HOME);
	free(state);
	if (elsewhere)
		memcpy(p->root, host, sizeof(host));
	return elsewhere;
}

// make_nodes does what NVIDIA's library does where they are missing: it makes the nodes
// of the driver and of the GPUs, and no others. Only root may.
static void make_nodes(const struct gs_machine *m)
{
	char path[GS_PATH + 64], name[64];
	for (int i = -1; i < m->gpu_count; i++) {
		int minor = i < 0 ? 255 : m->gpus[i].minor;
		if (i < 0)
			snprintf(name, sizeof(name), "dev/nvidiactl");
		else
			snprintf(name, sizeof(name), "dev/nvidia%d", minor);
		if (gs_join(path, sizeof(path), paths.root, name) == 0)
			gs_make_node(path, 195, (unsigned int)minor);
	}
}

static int node_present(const char *format, int number)
{
	char path[GS_PATH + 64], name[64];
	snprintf(name, sizeof(name), format, number);
	return gs_join(path, sizeof(path), paths.root, name) == 0 && gs_is_char_device(path);
}

static void refresh(void)
{
	if (gs_generation(&state) != viewed)
		viewed = gs_read(&state, &view);
}

// open_driver does what talking to the kernel driver for the first time is.
static nvmlReturn_t open_driver(void)
{
	int err = gs_find_for_library(&paths);
	if (err != 0)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	int on_host = find_host(&paths);
	if (!on_host && !node_present("dev/nvidiactl", 0))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	err = gs_open(paths.state, &state);
	if (err != 0) {
		report("open state", paths.state, err);
		return err == GS_ELAYOUT ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_ERROR_DRIVER_NOT_LOADED;
	}
	err = gs_repair(&state);
	if (err != 0)
		report("repair capability files of", paths.state, err);
	viewed = 0;
	refresh();
	if (on_host && geteuid() == 0)
		make_nodes(&view);
	if (!node_present("dev/nvidiactl", 0)) {
		gs_close(&state);
		return NVML_ERROR_DRIVER_NOT_LOADED;
	}
	visible = 0;
	for (int i = 0; i < view.gpu_count; i++)
		if (node_present("dev/nvidia%d", view.gpus[i].minor))
			visible |= 1u << i;
	wait_for(gs_open_driver(&state));
	return NVML_SUCCESS;
}

static nvmlReturn_t init(void)
{
	pthread_mutex_lock(&mutex);
	nvmlReturn_t r = NVML_SUCCESS;
	if (references == 0)
		r = open_driver();
	if (r == NVML_SUCCESS)
		references++;
	pthread_mutex_unlock(&mutex);
	return r;
}

nvmlReturn_t nvmlInit(void)
{
	return init();
}

nvmlReturn_t nvmlInit_v2(void)
{
	return init();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags; // NO_GPUS and NO_ATTACH only relax what cannot fail here
	return init();
}

nvmlReturn_t nvmlShutdown(void)
{
	pthread_mutex_lock(&mutex);
	nvmlReturn_t r = NVML_ERROR_UNINITIALIZED;
	if (references > 0) {
		r = NVML_SUCCESS;
		if (--references == 0) {
			gs_wake(&state); // who waits for an event finds it closed
			gs_close(&state);
		}
	}
	pthread_mutex_unlock(&mutex);
	return r;
}

int enter(void)
{
	pthread_mutex_lock(&mutex);
	if (references == 0) {
		pthread_mutex_unlock(&mutex);
		return 0;
	}
	refresh();
	// Processes that died since the view was made changed nothing in the file.
	gs_drop_dead(&state, &view);
	return 1;
}

void add_holders(void)
{
	gs_add_holders(&state, &view);
}

void leave(const int *entered)
{
	if (*entered)
		pthread_mutex_unlock(&mutex);
}

nvmlReturn_t unmodelled(const char *function)
{
	ENTER();
	gs_mark_unmodelled(&state, function);
	return NVML_ERROR_NOT_SUPPORTED;
}

// consult_closed opens the state just for fn. nvmlInit itself does it again.
static void consult_closed(consult_fn fn, struct call *call)
{
	struct gs_paths found;
	struct gs_handle h;
	if (gs_find_for_library(&found) != 0 || gs_open(found.state, &h) != 0)
		return;
	struct gs_machine *m = malloc(sizeof(*m));
	if (m != NULL) {
		gs_read(&h, m);
		fn(call, &h, m, found.state);
	}
	free(m);
	gs_close(&h);
}

void consult(consult_fn fn, struct call *call)
{
	__attribute__((cleanup(leave))) int entered = enter();
	if (entered)
		fn(call, &state, &view, paths.state);
	else if (strncmp(call->function, "nvmlInit", strlen("nvmlInit")) == 0)
		consult_closed(fn, call);
}

nvmlReturn_t open_again(struct gs_handle *h)
{
	ENTER();
	return gs_open(paths.state, h) == 0 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

nvmlReturn_t change(change_fn body, void *arg)
{
	int err = gs_begin(&state);
	if (err == EROFS)
		return NVML_ERROR_NO_PERMISSION;
	if (err == 0) {
		nvmlReturn_t r = body(state.next, arg);
		if (r != NVML_SUCCESS) {
			gs_abort(&state);
			return r;
		}
		err = gs_commit(&state);
	}
	if (err != 0) {
		report("change", paths.state, err);
		return NVML_ERROR_UNKNOWN;
	}
	refresh();
	return NVML_SUCCESS;
}

int may_administrate(void)
{
	return geteuid() == 0 && state.writable;
}

int may_configure(void)
{
	return geteuid() == 0 && node_present("dev/nvidia-caps/nvidia-cap%d", 1);
}

int gpu_visible(int gpu)
{
	return gpu < view.gpu_count && (visible >> gpu & 1u) != 0;
}

int gpu_at(unsigned int index)
{
	for (int i = 0; i < view.gpu_count; i++)
		if (gpu_visible(i) && index-- == 0)
			return i;
	return -1;
}

// instance_visible is the kernel's rule: who may configure MIG sees all
// instances, others need the capabilities of the GPU and compute instance.
int instance_visible(const struct gs_gpu *gpu, const struct gs_instance *in, const struct gs_compute *ci)
{
	if (node_present("dev/nvidia-caps/nvidia-cap%d", 1))
		return 1;
	int minor = 3 + 135 * gpu->minor + 9 * in->id;
	return node_present("dev/nvidia-caps/nvidia-cap%d", minor) &&
	       node_present("dev/nvidia-caps/nvidia-cap%d", minor + 1 + ci->id);
}
