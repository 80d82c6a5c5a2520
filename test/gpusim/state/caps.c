// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The capability files that the NVIDIA kernel module shows below
// /proc/driver/nvidia/capabilities, for one machine:
//
//	mig/config, mig/monitor
//	gpu<minor>/mig/gi<id>/access
//	gpu<minor>/mig/gi<id>/ci<id>/access
//
// Those of instances exist as long as the instance does. On a machine where minors move,
// what else depends on them follows, too.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// Device minors of nvidia-caps, as the kernel module numbers them.
enum {
	CONFIG_MINOR = 1,
	MONITOR_MINOR = 2,
	FIRST_MINOR = 3,
	PER_GPU = 135,
	PER_INSTANCE = 9,
};

int gs_join(char *out, size_t size, const char *dir, const char *name)
{
	int n = snprintf(out, size, "%s/%s", dir, name);
	return n < 0 || (size_t)n >= size ? ENAMETOOLONG : 0;
}

static int make_dir(const char *path)
{
	return mkdir(path, 0755) == 0 || errno == EEXIST ? 0 : errno;
}

// make_dirs makes a folder and its parents.
static int make_dirs(const char *path)
{
	char part[GS_PATH];
	size_t length = strlen(path);
	if (length >= sizeof(part))
		return ENAMETOOLONG;
	if (make_dir(path) == 0)
		return 0;
	for (size_t i = 1; i <= length; i++) {
		if (path[i] != '/' && path[i] != '\0')
			continue;
		memcpy(part, path, i);
		part[i] = '\0';
		int err = make_dir(part);
		if (err != 0)
			return err;
	}
	return 0;
}

// says reports whether a file has exactly this content.
static int says(const char *path, const char *text, size_t length)
{
	char present[128];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, present, sizeof(present));
	close(fd);
	return n == (ssize_t)length && memcmp(present, text, length) == 0;
}

// write_capability writes DIR/name as the kernel prints it; 292 is mode 0444. A
// file that is right is left alone: others may be reading it.
static int write_capability(const char *dir, const char *name, int minor)
{
	char path[GS_PATH], text[96];
	int err = gs_join(path, sizeof(path), dir, name);
	if (err != 0)
		return err;
	int n = snprintf(text, sizeof(text), "DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor);
	if (says(path, text, (size_t)n))
		return 0;
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	if (fd < 0)
		return errno;
	ssize_t written = write(fd, text, (size_t)n);
	err = written < 0 ? errno : (written == n ? 0 : EIO);
	close(fd);
	return err;
}

static int remove_tree(const char *path)
{
	if (unlink(path) == 0 || errno == ENOENT)
		return 0;
	DIR *dir = opendir(path);
	if (dir == NULL)
		return errno;
	int err = 0;
	struct dirent *e;
	while (err == 0 && (e = readdir(dir)) != NULL) {
		char child[GS_PATH];
		if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
			continue;
		err = gs_join(child, sizeof(child), path, e->d_name);
		if (err == 0)
			err = remove_tree(child);
	}
	closedir(dir);
	if (err == 0 && rmdir(path) != 0 && errno != ENOENT)
		err = errno;
	return err;
}

typedef int (*wanted_fn)(int id, const void *arg);

// remove_others removes the entries "<prefix><number>" that are not wanted.
static int remove_others(const char *path, const char *prefix, wanted_fn wanted, const void *arg)
{
	DIR *dir = opendir(path);
	if (dir == NULL)
		return errno == ENOENT ? 0 : errno;
	int err = 0;
	struct dirent *e;
	while (err == 0 && (e = readdir(dir)) != NULL) {
		char child[GS_PATH];
		int id, end = 0;
		size_t length = strlen(prefix);
		if (strncmp(e->d_name, prefix, length) != 0 ||
		    sscanf(e->d_name + length, "%d%n", &id, &end) != 1 || e->d_name[length + (size_t)end] != '\0' ||
		    wanted(id, arg))
			continue;
		err = gs_join(child, sizeof(child), path, e->d_name);
		if (err == 0)
			err = remove_tree(child);
	}
	closedir(dir);
	return err;
}

static int wanted_compute(int id, const void *arg)
{
	const struct gs_instance *in = arg;
	for (int i = 0; i < gs_bounded(in->compute_count, GS_MAX_COMPUTE); i++)
		if (in->compute[i].id == id)
			return 1;
	return 0;
}

static int wanted_instance(int id, const void *arg)
{
	const struct gs_gpu *gpu = arg;
	for (int i = 0; i < gs_bounded(gpu->instance_count, GS_MAX_INSTANCES); i++)
		if (gpu->instances[i].id == id)
			return 1;
	return 0;
}

static int wanted_gpu(int minor, const void *arg)
{
	const struct gs_machine *m = arg;
	for (int i = 0; i < gs_bounded(m->gpu_count, GS_MAX_GPUS); i++)
		if (m->gpus[i].mig_capable && m->gpus[i].minor == minor)
			return 1;
	return 0;
}

static int write_instance(const char *mig, int gpu_minor, const struct gs_instance *in)
{
	char gi[GS_PATH], ci[GS_PATH], name[32];
	int base = FIRST_MINOR + PER_GPU * gpu_minor + PER_INSTANCE * in->id;
	snprintf(name, sizeof(name), "gi%d", in->id);
	int err = gs_join(gi, sizeof(gi), mig, name);
	if (err == 0)
		err = make_dir(gi);
	if (err == 0)
		err = write_capability(gi, "access", base);
	for (int i = 0; err == 0 && i < gs_bounded(in->compute_count, GS_MAX_COMPUTE); i++) {
		snprintf(name, sizeof(name), "ci%d", in->compute[i].id);
		err = gs_join(ci, sizeof(ci), gi, name);
		if (err == 0)
			err = make_dir(ci);
		if (err == 0)
			err = write_capability(ci, "access", base + 1 + in->compute[i].id);
	}
	if (err == 0)
		err = remove_others(gi, "ci", wanted_compute, in);
	return err;
}

static int follow_gpu(const char *dir, const struct gs_gpu *gpu)
{
	char mig[GS_PATH], name[48];
	snprintf(name, sizeof(name), "gpu%d/mig", gpu->minor);
	int err = gs_join(mig, sizeof(mig), dir, name);
	if (err == 0)
		err = make_dirs(mig);
	for (int i = 0; err == 0 && i < gs_bounded(gpu->instance_count, GS_MAX_INSTANCES); i++)
		err = write_instance(mig, gpu->minor, &gpu->instances[i]);
	if (err == 0)
		err = remove_others(mig, "gi", wanted_instance, gpu);
	return err;
}

// write_common writes what does not depend on instances.
static int write_common(const char *dir, const struct gs_machine *m)
{
	char mig[GS_PATH];
	int err = gs_join(mig, sizeof(mig), dir, "mig");
	if (err == 0)
		err = make_dirs(mig);
	if (err == 0)
		err = write_capability(mig, "config", CONFIG_MINOR);
	if (err == 0)
		err = write_capability(mig, "monitor", MONITOR_MINOR);
	if (err == 0)
		err = remove_others(dir, "gpu", wanted_gpu, m);
	return err;
}

// same_gpus reports whether the machines have the same GPUs under the same
// minors, so that only instances can differ.
static int same_gpus(const struct gs_machine *a, const struct gs_machine *b)
{
	if (a->gpu_count != b->gpu_count)
		return 0;
	for (int i = 0; i < gs_bounded(a->gpu_count, GS_MAX_GPUS); i++)
		if (a->gpus[i].minor != b->gpus[i].minor || a->gpus[i].mig_capable != b->gpus[i].mig_capable)
			return 0;
	return 1;
}

// The minor is in the file that the driver shows of the GPU, and in the name and the
// number of its device node.
enum { NVIDIA_MAJOR = 195 };

#define CAPABILITIES "/var/lib/gpusim/proc/driver/nvidia/capabilities"
#define MINOR_LINE "Device Minor: \t "

// write_minor changes the line of the file about a GPU, if it has another minor.
static int write_minor(const char *path, int minor)
{
	char text[4096], new[sizeof(text) + 16], temporary[GS_PATH];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno;
	ssize_t n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n < 0)
		return errno;
	text[n] = '\0';
	char *line = strstr(text, MINOR_LINE);
	if (line == NULL)
		return EINVAL;
	line += strlen(MINOR_LINE);
	const char *rest = strchr(line, '\n');
	if (rest == NULL)
		return EINVAL;
	int length = snprintf(new, sizeof(new), "%.*s%d%s", (int)(line - text), text, minor, rest);
	if ((ssize_t)length == n && memcmp(new, text, (size_t)n) == 0)
		return 0;
	int size = snprintf(temporary, sizeof(temporary), "%s.new", path);
	if (size < 0 || (size_t)size >= sizeof(temporary))
		return ENAMETOOLONG;
	fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
	if (fd < 0)
		return errno;
	ssize_t written = write(fd, new, (size_t)length);
	int err = written == length ? 0 : (written < 0 ? errno : EIO);
	close(fd);
	if (err == 0 && rename(temporary, path) != 0)
		err = errno;
	return err;
}

// make_node makes the device node of a GPU as nvidia-modprobe does.
static int make_node(const char *dev, int minor)
{
	char path[GS_PATH], name[32];
	snprintf(name, sizeof(name), "nvidia%d", minor);
	int err = gs_join(path, sizeof(path), dev, name);
	if (err != 0 || gs_is_char_device(path))
		return err;
	mode_t mask = umask(0);
	if (syscall(SYS_mknodat, AT_FDCWD, path, S_IFCHR | 0666, NVIDIA_MAJOR << 8 | minor) != 0)
		err = errno;
	umask(mask);
	return err;
}

static int has_minor(int minor, const void *arg)
{
	const struct gs_machine *m = arg;
	for (int i = 0; i < gs_bounded(m->gpu_count, GS_MAX_GPUS); i++)
		if (m->gpus[i].minor == minor)
			return 1;
	return 0;
}

// move_minors gives the GPUs the nodes and the lines of the machine after. A machine that
// is being made has neither yet.
static int move_minors(const char *capabilities, const struct gs_machine *after)
{
	size_t length = strlen(capabilities), suffix = strlen(CAPABILITIES);
	if (!after->moving_minors || length < suffix || strcmp(capabilities + length - suffix, CAPABILITIES) != 0)
		return 0;
	char dev[GS_PATH], path[GS_PATH];
	int size = snprintf(dev, sizeof(dev), "%.*s/dev", (int)(length - suffix), capabilities);
	int err = size < 0 || (size_t)size >= sizeof(dev) ? ENAMETOOLONG : 0;
	for (int i = 0; err == 0 && i < gs_bounded(after->gpu_count, GS_MAX_GPUS); i++) {
		size = snprintf(path, sizeof(path), "%.*s/gpus/%s/information", (int)(length - strlen("/capabilities")),
				capabilities, after->gpus[i].pci_address);
		err = size < 0 || (size_t)size >= sizeof(path) ? ENAMETOOLONG : write_minor(path, after->gpus[i].minor);
		if (err == ENOENT)
			return 0;
		if (err == 0)
			err = make_node(dev, after->gpus[i].minor);
	}
	return err == 0 ? remove_others(dev, "nvidia", has_minor, after) : err;
}

static int same_instances(const struct gs_gpu *a, const struct gs_gpu *b)
{
	return a->instance_count == b->instance_count &&
	       memcmp(a->instances, b->instances,
		      sizeof(a->instances[0]) * (size_t)gs_bounded(a->instance_count, GS_MAX_INSTANCES)) == 0;
}

int gs_capabilities_follow(const char *dir, const struct gs_machine *before, const struct gs_machine *after)
{
	int err = 0;
	if (before == NULL || !same_gpus(before, after)) {
		before = NULL;
		err = write_common(dir, after);
		if (err == 0)
			err = move_minors(dir, after);
	}
	for (int i = 0; err == 0 && i < gs_bounded(after->gpu_count, GS_MAX_GPUS); i++) {
		const struct gs_gpu *gpu = &after->gpus[i];
		if (gpu->mig_capable && (before == NULL || !same_instances(&before->gpus[i], gpu)))
			err = follow_gpu(dir, gpu);
	}
	return err;
}
