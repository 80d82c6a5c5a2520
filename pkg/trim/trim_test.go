// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
)

// held returns how many bytes of heap the process has of the kernel.
func held() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapSys - m.HeapReleased
}

const big = 256 << 20

// waste uses a part of the heap that nobody uses any more.
//
//go:noinline
func waste(bytes int) {
	part := make([]byte, bytes)
	for i := 0; i < len(part); i += 4096 {
		part[i] = 1
	}
}

// TestAfterStart: what nobody uses is the kernel's again.
func TestAfterStart(t *testing.T) {
	for name, ended := range map[string]bool{"runs": false, "has ended": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if ended {
					cancel()
				}
				waste(big)
				before := held()
				AfterStart(ctx)
				if back := int64(before) - int64(held()); (back > big/2) == ended {
					t.Errorf("%d MiB of %d were given back", back>>20, big>>20)
				}
			})
		})
	}
}
