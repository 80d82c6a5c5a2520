// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Whether a GPU has room for one more GPU instance.

#ifndef GPUSIM_MIG_ROOM_H
#define GPUSIM_MIG_ROOM_H

#include "layout.h"

enum { ENGINE_KINDS = 5 }; // copy, decoder, encoder, JPEG, OFA

struct room {
	const struct gs_gpu *gpu;
	uint64_t slices;            // bit per occupied memory slice
	int engines[ENGINE_KINDS];  // in use
	int has[ENGINE_KINDS];      // of the whole GPU
	int count[GS_MAX_PROFILES]; // instances by profile
	int media;                  // instances that have media engines
	int extended;               // instances with a +me or all-engines profile
	int all_media;              // instances with all media engines
};

void room_of(const struct gs_gpu *gpu, struct room *room);
int room_for(const struct room *room, const struct gs_profile *p, struct gs_placement at);
void room_take(struct room *room, const struct gs_profile *p, struct gs_placement at);

#endif
