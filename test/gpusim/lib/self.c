// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Both libraries find the machine by where they are.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // dl_iterate_phdr
#endif

#include "self.h"

#include <errno.h>
#include <link.h>
#include <stdlib.h>

static int own_object(struct dl_phdr_info *info, size_t size, void *arg)
{
	(void)size;
	uintptr_t here = (uintptr_t)&own_object;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		uintptr_t start = (uintptr_t)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
		if (info->dlpi_phdr[i].p_type == PT_LOAD && here >= start &&
		    here < start + info->dlpi_phdr[i].p_memsz) {
			*(char **)arg = realpath(info->dlpi_name, NULL);
			return 1;
		}
	}
	return 0;
}

// (dladdr would be simpler, but ties the library to the C library it was built
// with.)
int gs_find_for_library(struct gs_paths *out)
{
	char *self = NULL;
	dl_iterate_phdr(own_object, &self);
	if (self == NULL)
		return ENOENT;
	int err = gs_find(self, out);
	free(self);
	return err;
}
