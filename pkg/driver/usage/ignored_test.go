// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestIgnoredLimit: a claim is told once that a program asks for a limit in vain, and not where the driver holds one. A process
// that keeps its reader waiting keeps nobody else from being sampled.
func TestIgnoredLimit(t *testing.T) {
	t.Parallel()
	const asks = "PATH=/bin\x00NVIDIA_GPU_MEMORY_LIMIT=1024\x00"
	for name, test := range map[string]struct {
		environ string
		kind    device.Kind
		held    bool
		pod     string
		want    []string
	}{
		"a whole GPU":           {asks, device.Whole, false, "a", []string{"c MemoryLimitIgnored"}},
		"a share":               {asks, device.TimeSlice, false, "a", []string{"c MemoryLimitIgnored"}},
		"a share that is held":  {asks, device.TimeSlice, true, "a", nil},
		"another pod's program": {asks, device.TimeSlice, false, "b", nil},
		"another variable":      {"MY_NVIDIA_GPU_MEMORY_LIMIT=1\x00NVIDIA_GPU_MEMORY_LIMITS=1", device.TimeSlice, false, "a", nil},
		"an endless look":       {"hangs", device.TimeSlice, false, "a", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.environ = map[int]string{10: test.environ}
				w.hangs["environ"] = make(chan struct{})
				defer close(w.hangs["environ"])
				c := claimNamed("c", "A", test.kind)
				c.Devices[0].Limits = &claim.LiveLimits{MemoryBytes: 1, Held: test.held}
				w.hold(c)
				w.pods["c"] = []string{test.pod}
				w.use("A", 30, process(10, -1, 10))
				s := w.run(t)
				pass(3 * interval)
				var warned []string
				if w.with(func() { warned = w.warned }); !slices.Equal(warned, test.want) {
					t.Errorf("events %q, want %q", warned, test.want)
				}
				if test.environ != "hangs" {
					return
				}
				w.use("A", 99, []gpu.ProcessUsage{process(10, -1, 10), process(11, -1, 10)}...)
				pass(2 * interval)
				if got := s.Snapshot().GPUs["A"]; got.Usage == nil || got.Usage.UsedBytes != 99 {
					t.Errorf("the GPU is not sampled any more: %+v", got)
				}
			})
		})
	}
}
