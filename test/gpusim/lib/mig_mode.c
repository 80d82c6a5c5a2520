// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// MIG mode of a GPU.

#include "lib.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode, unsigned int *pendingMode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (currentMode == NULL || pendingMode == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!t.gpu->mig_capable)
		return NVML_ERROR_NOT_SUPPORTED;
	*currentMode = t.gpu->mig_current ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
	*pendingMode = t.gpu->mig_pending ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
	return NVML_SUCCESS;
}

struct mode_change {
	nvmlDevice_t device;
	int mode;
	nvmlReturn_t activation;
};

// free_minor is the lowest minor that no GPU has.
static int free_minor(const struct gs_machine *m)
{
	for (int minor = 0;; minor++) {
		int taken = 0;
		for (int i = 0; i < m->gpu_count; i++)
			taken |= m->gpus[i].minor == minor;
		if (!taken)
			return minor;
	}
}

// set_mode decides what the driver does at once. The call itself succeeds even
// where the mode did not change; the activation status says so.
static nvmlReturn_t set_mode(struct gs_machine *m, void *arg)
{
	struct mode_change *c = arg;
	struct target t;
	nvmlReturn_t r = target_gpu(m, c->device, &t);
	if (r != NVML_SUCCESS)
		return r;

	c->activation = NVML_SUCCESS;
	if (t.gpu->mig_current == c->mode) {
		t.gpu->mig_pending = c->mode; // takes back a change that waits
		return NVML_SUCCESS;
	}
	if (t.gpu->reset_to_switch) {
		// Ampere: recorded, and in force after a reset. Whoever has the GPU open is in
		// the way of one, whether NVML lists them or not.
		int busy = held(m, t.index, -1, -1) || t.gpu->instance_count > 0;
		t.gpu->mig_pending = c->mode;
		c->activation = busy ? NVML_ERROR_IN_USE : NVML_ERROR_RESET_REQUIRED;
		return NVML_SUCCESS;
	}
	if (t.gpu->instance_count > 0) {
		// Hopper and later: no reset will come, so nothing stays pending.
		c->activation = NVML_ERROR_IN_USE;
		return NVML_SUCCESS;
	}
	// Nobody is in the way of the mode, but maybe of the first instance: see mig_gi.c. The
	// compute mode stays, and cannot be changed meanwhile.
	t.gpu->mig_current = t.gpu->mig_pending = c->mode;
	if (m->moving_minors)
		t.gpu->minor = free_minor(m);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activationStatus)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (activationStatus == NULL || (mode != NVML_DEVICE_MIG_DISABLE && mode != NVML_DEVICE_MIG_ENABLE))
		return NVML_ERROR_INVALID_ARGUMENT;
	// That the mode can be read where the driver manages coherent memory is assumed.
	if (!t.gpu->mig_capable || driver_manages_memory(t.gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!may_administrate() || !may_configure())
		return NVML_ERROR_NO_PERMISSION;
	struct mode_change c = {.device = device, .mode = (int)mode};
	r = change(set_mode, &c);
	if (r == NVML_SUCCESS)
		*activationStatus = c.activation;
	return r;
}
