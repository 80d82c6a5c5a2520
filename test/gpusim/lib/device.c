// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Enumeration: how many devices, and handles by index, UUID, serial and PCI
// bus id.

#include "lib.h"

#include <stdio.h>
#include <strings.h>

static nvmlReturn_t count(unsigned int *deviceCount)
{
	ENTER();
	if (deviceCount == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*deviceCount = 0;
	while (gpu_at(*deviceCount) >= 0)
		++*deviceCount;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *deviceCount)
{
	return count(deviceCount);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount)
{
	return count(deviceCount);
}

static nvmlReturn_t give_gpu(int gpu, nvmlDevice_t *device)
{
	*device = gpu_handle(gpu);
	return device->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

static nvmlReturn_t by_index(unsigned int index, nvmlDevice_t *device)
{
	ENTER();
	int gpu = gpu_at(index);
	if (device == NULL || gpu < 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give_gpu(gpu, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return by_index(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	return by_index(index, device);
}

int gpu_of_index(const void *index)
{
	return gpu_at(*(const unsigned int *)index);
}

// A GPU's serial is the board's, so two GPUs may share it; NVML then gives the
// first.
int gpu_of_serial(const void *serial)
{
	for (int i = 0; serial != NULL && i < view.gpu_count; i++)
		if (gpu_visible(i) && strcmp(view.gpus[i].serial, serial) == 0)
			return i;
	return -1;
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	ENTER();
	if (serial == NULL || device == NULL || serial[0] == '\0')
		return NVML_ERROR_INVALID_ARGUMENT;
	int gpu = gpu_of_serial(serial);
	return gpu < 0 ? NVML_ERROR_NOT_FOUND : give_gpu(gpu, device);
}

// mig_by_uuid finds a visible MIG device of one GPU.
static nvmlReturn_t mig_by_uuid(int gpu, const char *uuid, nvmlDevice_t *device)
{
	const struct gs_gpu *g = &view.gpus[gpu];
	for (int i = 0; i < g->instance_count; i++) {
		const struct gs_instance *in = &g->instances[i];
		for (int j = 0; j < in->compute_count; j++) {
			const struct gs_compute *ci = &in->compute[j];
			if (strcasecmp(ci->uuid, uuid) != 0 || !instance_visible(g, in, ci))
				continue;
			*device = mig_handle(gpu, in, ci);
			return device->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t by_uuid(const char *uuid, nvmlDevice_t *device)
{
	nvmlReturn_t r = NVML_ERROR_NOT_FOUND;
	for (int i = 0; r == NVML_ERROR_NOT_FOUND && i < view.gpu_count; i++) {
		if (!gpu_visible(i))
			continue;
		if (strcasecmp(view.gpus[i].uuid, uuid) == 0)
			r = give_gpu(i, device);
		else
			r = mig_by_uuid(i, uuid, device);
	}
	return r;
}

int gpu_of_uuid(const void *uuid)
{
	nvmlDevice_t device;
	if (uuid == NULL || by_uuid(uuid, &device) != NVML_SUCCESS)
		return -1;
	return gpu_of_handle(device.handle);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	ENTER();
	if (uuid == NULL || device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	return by_uuid(uuid, device);
}

static nvmlReturn_t by_typed_uuid(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
	if (uuid->version != nvmlUUID_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (uuid->type == NVML_UUID_TYPE_ASCII) {
		char text[sizeof(uuid->value.str) + 1] = {0};
		memcpy(text, uuid->value.str, sizeof(uuid->value.str));
		return by_uuid(text, device);
	}
	if (uuid->type != NVML_UUID_TYPE_BINARY)
		return NVML_ERROR_INVALID_ARGUMENT;
	const unsigned char *b = uuid->value.bytes;
	nvmlReturn_t r = NVML_ERROR_NOT_FOUND;
	static const char *const prefixes[] = {"GPU", "MIG"};
	for (int i = 0; r == NVML_ERROR_NOT_FOUND && i < 2; i++) {
		char text[64];
		snprintf(text, sizeof(text), "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
			 prefixes[i], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12],
			 b[13], b[14], b[15]);
		r = by_uuid(text, device);
	}
	return r;
}

int gpu_of_typed_uuid(const void *uuid)
{
	nvmlDevice_t device;
	if (uuid == NULL || by_typed_uuid(uuid, &device) != NVML_SUCCESS)
		return -1;
	return gpu_of_handle(device.handle);
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
	ENTER();
	if (uuid == NULL || device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	return by_typed_uuid(uuid, device);
}

struct address {
	unsigned int domain, bus, device;
};

// parse_address takes "domain:bus:device.function" with any number of digits,
// and the same without the domain.
static int parse_address(const char *text, struct address *a)
{
	unsigned int function;
	int end = 0;
	if (sscanf(text, "%x:%x:%x.%x%n", &a->domain, &a->bus, &a->device, &function, &end) == 4)
		return text[end] == '\0';
	a->domain = 0;
	if (sscanf(text, "%x:%x.%x%n", &a->bus, &a->device, &function, &end) == 3)
		return text[end] == '\0';
	return 0;
}

// find_address is the visible GPU at an address, or -1.
static int find_address(struct address wanted)
{
	struct address a;
	for (int i = 0; i < view.gpu_count; i++)
		if (gpu_visible(i) && parse_address(view.gpus[i].pci_address, &a) && a.domain == wanted.domain &&
		    a.bus == wanted.bus && a.device == wanted.device)
			return i;
	return -1;
}

int gpu_of_bus_id(const void *bus_id)
{
	struct address a;
	return bus_id == NULL || !parse_address(bus_id, &a) ? -1 : find_address(a);
}

static nvmlReturn_t by_bus_id(const char *pciBusId, nvmlDevice_t *device)
{
	ENTER();
	struct address wanted;
	if (pciBusId == NULL || device == NULL || !parse_address(pciBusId, &wanted))
		return NVML_ERROR_INVALID_ARGUMENT;
	int gpu = find_address(wanted);
	return gpu < 0 ? NVML_ERROR_NOT_FOUND : give_gpu(gpu, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pciBusId, nvmlDevice_t *device)
{
	return by_bus_id(pciBusId, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pciBusId, nvmlDevice_t *device)
{
	return by_bus_id(pciBusId, device);
}

int fill_pci(const char *address, nvmlPciInfo_t *pci, int with_bus_id)
{
	struct address a;
	if (!parse_address(address, &a))
		return 0;
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", a.domain & 0xffff, a.bus & 0xff,
		 a.device & 0xff);
	pci->domain = a.domain;
	pci->bus = a.bus;
	pci->device = a.device;
	if (with_bus_id)
		snprintf(pci->busId, sizeof(pci->busId), NVML_DEVICE_PCI_BUS_ID_FMT, a.domain, a.bus, a.device);
	return 1;
}

static nvmlReturn_t pci_info(nvmlDevice_t device, nvmlPciInfo_t *pci, int with_bus_id)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (pci == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!fill_pci(t.gpu->pci_address, pci, with_bus_id))
		return NVML_ERROR_UNKNOWN;
	pci->pciDeviceId = t.gpu->pci_device_id;
	pci->pciSubSystemId = t.gpu->pci_subsystem;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	return pci_info(device, pci, 0);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	return pci_info(device, pci, 0);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	return pci_info(device, pci, 1);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
	nvmlPciInfo_t info;
	nvmlReturn_t r = pci_info(device, &info, 1);
	if (r != NVML_SUCCESS)
		return r;
	if (pci == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (pci->version != nvmlPciInfoExt_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	pci->domain = info.domain;
	pci->bus = info.bus;
	pci->device = info.device;
	pci->pciDeviceId = info.pciDeviceId;
	pci->pciSubSystemId = info.pciSubSystemId;
	pci->baseClass = 0x03; // display controller
	pci->subClass = 0x02;  // 3D
	memcpy(pci->busId, info.busId, sizeof(pci->busId));
	return NVML_SUCCESS;
}
