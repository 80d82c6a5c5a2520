// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The least that passes for libcuda.so.1: programs that look for a CUDA driver
// find one. It runs nothing.

#define EXPORT __attribute__((visibility("default")))

EXPORT int cuInit(unsigned int flags);
EXPORT int cuDriverGetVersion(int *version);

int cuInit(unsigned int flags)
{
	return flags == 0 ? 0 : 1; // CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE
}

int cuDriverGetVersion(int *version)
{
	if (version == 0)
		return 1;
	*version = 13000; // CUDA 13.0
	return 0;
}
