// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#include "files.h"

#include <sys/resource.h>

static unsigned long long inherited;

__attribute__((constructor)) static void look(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
		inherited = limit.rlim_cur;
}

unsigned long long inherited_open_files(void)
{
	return inherited;
}
