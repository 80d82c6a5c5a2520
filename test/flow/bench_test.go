// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"testing"
	"time"
)

// BenchmarkPrepare measures Prepare and Unprepare of one claim over gRPC, as the
// kubelet sees them: the GET of the claim, planning, journal with fsync, NVML
// (which takes no simulated time here) and the CDI file. An operation is one of
// each.
func BenchmarkPrepare(b *testing.B) {
	for _, test := range []struct {
		name   string
		device request
		// beside is a partition that stays, so that MIG mode does.
		beside []request
	}{
		{name: "whole", device: request{gpu: 0}},
		{name: "partition", device: mig(0, "1g.10gb", 0), beside: []request{mig(0, "1g.10gb", 1)}},
		{name: "partition-with-mode", device: mig(0, "1g.10gb", 0)},
	} {
		b.Run(test.name, func(b *testing.B) {
			n := newNode(b, "dgx-h100")
			p := n.start(b)
			p.ready(b)
			if test.beside != nil {
				p.mustPrepare(b, n.allocate(n.names(b, test.beside)))
			}
			names := n.names(b, []request{test.device})
			// The first claim pays for what is made once.
			first := n.allocate(names)
			p.mustPrepare(b, first)
			p.mustUnprepare(b, first)

			var prepare, unprepare []time.Duration
			for b.Loop() {
				claim := n.allocate(names)
				prepare = append(prepare, timed(func() { p.mustPrepare(b, claim) }))
				unprepare = append(unprepare, timed(func() { p.mustUnprepare(b, claim) }))
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
