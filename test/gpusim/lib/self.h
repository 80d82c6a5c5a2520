// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef GPUSIM_SELF_H
#define GPUSIM_SELF_H

#include "state.h"

// gs_find_for_library is gs_find on behalf of the library that this code is a
// part of, from where its file really is.
int gs_find_for_library(struct gs_paths *out);

#endif
