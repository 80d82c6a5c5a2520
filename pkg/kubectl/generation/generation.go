// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package generation says which ResourceSlices of a pool count.
package generation

import resourceapi "k8s.io/api/resource/v1"

// Newest returns the slices of a pool that count, which are those of its newest generation, and whether all of these are there.
func Newest(pool []*resourceapi.ResourceSlice) (newest []*resourceapi.ResourceSlice, complete bool) {
	for _, s := range pool {
		if len(newest) > 0 && s.Spec.Pool.Generation > newest[0].Spec.Pool.Generation {
			newest = nil
		}
		if len(newest) == 0 || s.Spec.Pool.Generation == newest[0].Spec.Pool.Generation {
			newest = append(newest, s)
		}
	}
	return newest, len(newest) > 0 && int64(len(newest)) == newest[0].Spec.Pool.ResourceSliceCount
}
