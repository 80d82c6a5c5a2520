// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import "testing"

// TestOffsetsStay: the bytes of locks are a protocol between two versions of the plugin that
// run side by side during an upgrade. With others they would work on the same GPU at the same time.
func TestOffsetsStay(t *testing.T) {
	for n, want := range map[name]int64{
		claimLock("0f2dbd0e-7f5b-4b0e-8f2b-4f6c3b1f6f5a"): 931792883910321804,
		gpuLock("0000:1b:00.0"):                           4450363530803340680,
	} {
		if got := n.offset(); got != want {
			t.Errorf("%s: byte %d, want %d", n, got, want)
		}
	}
}
