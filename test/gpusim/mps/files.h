// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef GPUSIM_FILES_H
#define GPUSIM_FILES_H

// inherited_open_files is the limit of open files that this process was started with.
// Go raises it before any Go code runs.
unsigned long long inherited_open_files(void);

#endif
