// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What a GPU's NVLinks lead to.

#include "lib.h"

// LINK begins a function about a link of a GPU, which a MIG device does not have. That links are
// inactive while MIG mode is on is assumed: NVIDIA says that there is no peer access then.
#define LINK(valid)                                                                       \
	ENTER();                                                                          \
	struct target t;                                                                  \
	nvmlReturn_t r = target_device(&view, device, &t);                                \
	if (r != NVML_SUCCESS)                                                            \
		return r;                                                                 \
	if (!(valid))                                                                     \
		return NVML_ERROR_INVALID_ARGUMENT;                                       \
	if (t.ci != NULL || t.gpu->nvlink_count == 0)                                     \
		return NVML_ERROR_NOT_SUPPORTED;                                          \
	if (link >= (unsigned int)t.gpu->nvlink_count)                                    \
		return NVML_ERROR_INVALID_ARGUMENT;                                       \
	const struct gs_nvlink *nvlink = &t.gpu->nvlinks[link];                           \
	int active = !nvlink->down && !t.gpu->mig_current

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *isActive)
{
	LINK(isActive != NULL);
	*isActive = active ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
						 nvmlIntNvLinkDeviceType_t *pNvLinkDeviceType)
{
	LINK(pNvLinkDeviceType != NULL);
	if (!active)
		return NVML_ERROR_NOT_SUPPORTED;
	*pNvLinkDeviceType = (nvmlIntNvLinkDeviceType_t)nvlink->remote_type;
	return NVML_SUCCESS;
}

static nvmlReturn_t remote_pci(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci, int with_bus_id)
{
	LINK(pci != NULL);
	if (!active || !fill_pci(nvlink->remote, pci, with_bus_id))
		return NVML_ERROR_NOT_SUPPORTED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	return remote_pci(device, link, pci, 0);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	return remote_pci(device, link, pci, 1);
}
