// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"slices"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/flow/harness"
)

// BenchmarkPrepare measures Prepare and Unprepare of one claim over gRPC, as the
// kubelet sees them: the GET of the claim, planning, the journal, NVML
// (which takes no simulated time here) and the CDI file. An operation is one of
// each.
func BenchmarkPrepare(b *testing.B) {
	for _, test := range []struct {
		name   string
		device harness.Device
		// beside is a partition that stays, so that MIG mode does.
		beside []harness.Device
		// flags of the driver; the harness leaves claim status and device metadata off.
		flags []string
	}{
		{name: "whole", device: harness.Device{GPU: 0}},
		{name: "partition", device: harness.Partition(0, "1g.10gb", 0), beside: []harness.Device{harness.Partition(0, "1g.10gb", 1)}},
		{name: "partition-with-mode", device: harness.Partition(0, "1g.10gb", 0)},
		{
			name: "partition-with-status", device: harness.Partition(0, "1g.10gb", 0), beside: []harness.Device{harness.Partition(0, "1g.10gb", 1)},
			flags: []string{"--claim-status=true"},
		},
		{
			name: "partition-with-status-and-metadata", device: harness.Partition(0, "1g.10gb", 0), beside: []harness.Device{harness.Partition(0, "1g.10gb", 1)},
			flags: []string{"--claim-status=true", "--device-metadata=true"},
		},
	} {
		b.Run(test.name, func(b *testing.B) {
			n := harness.NewNode(b, "dgx-h100")
			p := n.Start(b, test.flags...)
			p.Ready(b)
			if test.beside != nil {
				p.MustPrepare(b, n.Allocate(b, test.beside))
			}
			names := n.DeviceNames(b, []harness.Device{test.device})
			// The first claim pays for what is made once.
			first := n.AllocateNamed(names)
			p.MustPrepare(b, first)
			p.MustUnprepare(b, first)

			var prepare, unprepare []time.Duration
			for b.Loop() {
				claim := n.AllocateNamed(names)
				prepare = append(prepare, timed(func() { p.MustPrepare(b, claim) }))
				unprepare = append(unprepare, timed(func() { p.MustUnprepare(b, claim) }))
			}
			report(b, "prepare", prepare)
			report(b, "unprepare", unprepare)
		})
	}
}

func timed(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}

func report(b *testing.B, what string, all []time.Duration) {
	slices.Sort(all)
	quantile := func(q float64) float64 {
		return float64(all[int(q*float64(len(all)-1))]) / float64(time.Millisecond)
	}
	b.ReportMetric(quantile(0.50), what+"-p50-ms")
	b.ReportMetric(quantile(0.99), what+"-p99-ms")
}
