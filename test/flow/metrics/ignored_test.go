// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestMemoryLimitIgnored: a program has NVIDIA's variable for a limit of memory, which nobody holds. It runs, and its claim is told.
func TestMemoryLimitIgnored(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, flags...)
	p.Ready(t)
	u := newUser(t, n, p, 1, harness.Device{})
	spec := n.Container(t, u.ids...)
	spec.Process.Env = append(spec.Process.Env, "NVIDIA_GPU_MEMORY_LIMIT=1024")
	program, err := n.StartReady(t.Context(), t, spec, "hold", "--memory=2Gi")
	if err != nil {
		t.Fatal(err)
	}
	program.InPod(t, u.uid)
	p.UntilEvent(t, n, "MemoryLimitIgnored", "NVIDIA_GPU_MEMORY_LIMIT has no effect")
}
