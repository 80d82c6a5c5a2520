// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// GPM: metrics from two samples, the only way to see how busy a partition is.

#include "lib.h"
#include "wait.h"

#include <stdlib.h>

struct gpm_sample {
	struct gpm_sample *next;
	const void *of; // the device that it was taken of; NULL: none yet
	uint64_t instance; // serial; 0: the GPU
	int64_t time;
	unsigned int sm;
};

static struct gpm_sample *samples;

static struct gpm_sample *sample_of(nvmlGpmSample_t sample)
{
	for (struct gpm_sample *s = samples; s != NULL; s = s->next)
		if (s == (void *)sample.handle)
			return s;
	return NULL;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *gpmSample)
{
	ENTER();
	if (gpmSample == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	struct gpm_sample *s = calloc(1, sizeof(*s));
	if (s == NULL)
		return NVML_ERROR_MEMORY;
	s->next = samples;
	samples = s;
	gpmSample->handle = (void *)s;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t gpmSample)
{
	ENTER();
	for (struct gpm_sample **s = &samples; *s != NULL; s = &(*s)->next)
		if (*s == (void *)gpmSample.handle) {
			struct gpm_sample *freed = *s;
			*s = freed->next;
			free(freed);
			return NVML_SUCCESS;
		}
	return NVML_ERROR_INVALID_ARGUMENT;
}

static int supports_gpm(const struct gs_gpu *gpu)
{
	return gpu->architecture >= NVML_DEVICE_ARCH_HOPPER; // nvml.h
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *gpmSupport)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (gpmSupport == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (gpmSupport->version != NVML_GPM_SUPPORT_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	gpmSupport->isSupportedDevice = supports_gpm(t.gpu) != 0;
	return NVML_SUCCESS;
}

static nvmlReturn_t take_sample(const struct target *t, nvmlGpmSample_t gpmSample)
{
	struct gpm_sample *s = sample_of(gpmSample);
	if (s == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!supports_gpm(t->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	s->of = gpu_handle(t->index).handle;
	s->instance = t->ci != NULL ? t->ci->serial : t->in != NULL ? t->in->serial : 0;
	s->time = monotonic();
	s->sm = utilization(t);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t gpmSample)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	return r != NVML_SUCCESS ? r : take_sample(&t, gpmSample);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpuInstanceId, nvmlGpmSample_t gpmSample)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (!t.gpu->mig_current)
		return NVML_ERROR_NOT_SUPPORTED;
	t.in = instance_by_id(t.gpu, gpuInstanceId);
	return t.in == NULL ? NVML_ERROR_NOT_FOUND : take_sample(&t, gpmSample);
}

// Less than what nvml.h wants between two samples.
enum { SHORTEST = 100000000 };

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *metricsGet)
{
	ENTER();
	if (metricsGet == NULL || metricsGet->numMetrics > NVML_GPM_METRIC_MAX)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (metricsGet->version != NVML_GPM_METRICS_GET_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	const struct gpm_sample *a = sample_of(metricsGet->sample1), *b = sample_of(metricsGet->sample2);
	if (a == NULL || b == NULL || a->of == NULL || a->of != b->of || a->instance != b->instance)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned int i = 0; i < metricsGet->numMetrics; i++) {
		nvmlGpmMetric_t *m = &metricsGet->metrics[i];
		m->value = 0;
		m->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
		if (m->metricId != NVML_GPM_METRIC_SM_UTIL && m->metricId != NVML_GPM_METRIC_GRAPHICS_UTIL)
			continue;
		m->nvmlReturn = b->time - a->time < SHORTEST ? NVML_ERROR_NO_DATA : NVML_SUCCESS;
		m->value = (a->sm + b->sm) / 2.0;
	}
	return NVML_SUCCESS;
}
