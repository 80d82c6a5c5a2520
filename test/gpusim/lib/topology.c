// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// How near to one another GPUs are.

#include "lib.h"

#include <string.h>

// GPUs behind one switch need not pass the host bridge. Any others are behind bridges of their own:
// two that share a root complex meet at the host bridge, as sysroot's tree of the PCI bus shows.
nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device1, nvmlDevice_t device2, nvmlGpuTopologyLevel_t *pathInfo)
{
	ENTER();
	struct target a, b;
	nvmlReturn_t r = target_gpu(&view, device1, &a);
	if (r == NVML_SUCCESS)
		r = target_gpu(&view, device2, &b);
	if (r != NVML_SUCCESS)
		return r;
	if (pathInfo == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (a.gpu == b.gpu)
		*pathInfo = NVML_TOPOLOGY_INTERNAL;
	else if (a.gpu->pcie_switch[0] != '\0' && strcmp(a.gpu->pcie_switch, b.gpu->pcie_switch) == 0)
		*pathInfo = NVML_TOPOLOGY_SINGLE;
	else if (strcmp(a.gpu->pcie_root, b.gpu->pcie_root) == 0)
		*pathInfo = NVML_TOPOLOGY_HOSTBRIDGE;
	else if (a.gpu->numa_node == b.gpu->numa_node)
		*pathInfo = NVML_TOPOLOGY_NODE;
	else
		*pathInfo = NVML_TOPOLOGY_SYSTEM;
	return NVML_SUCCESS;
}
