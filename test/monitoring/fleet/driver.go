// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"time"
)

// claimsPerHour is how many claims a node prepares.
var claimsPerHour = map[string]float64{"dgx-1": 46, "hgx-2": 12, "edge-3": 5}

// fractions says how much of all operations took at most so many seconds.
type fractions map[float64]float64

var (
	prepares   = fractions{0.001: 0, 0.01: 0.05, 0.1: 0.3, 0.5: 0.45, 1: 0.6, 2.5: 0.9, 5: 0.98, 10: 1, 30: 1, 60: 1, math.Inf(1): 1}
	unprepares = fractions{0.001: 0, 0.01: 0.1, 0.1: 0.4, 0.5: 0.6, 1: 0.8, 2.5: 0.97, 5: 1, 10: 1, 30: 1, 60: 1, math.Inf(1): 1}
	steps      = map[string]fractions{
		"wait":    {0.001: 0.8, 0.01: 0.85, 0.1: 0.9, 1: 0.97, 10: 1, math.Inf(1): 1},
		"nvml":    {0.001: 0, 0.01: 0.1, 0.1: 0.35, 1: 0.65, 10: 1, math.Inf(1): 1},
		"cdi":     {0.001: 0.2, 0.01: 0.99, 0.1: 1, 1: 1, 10: 1, math.Inf(1): 1},
		"journal": {0.001: 0.1, 0.01: 0.9, 0.1: 1, 1: 1, 10: 1, math.Inf(1): 1},
		"mps":     {0.001: 0, 0.01: 0, 0.1: 0.2, 1: 0.9, 10: 1, math.Inf(1): 1},
	}
)

// driver writes what the driver of a node says about its own work.
func (r *recording) driver(n *node) {
	base := scraped(n.name)
	count := func(share float64) float64 {
		return math.Floor((48*time.Hour - r.before).Hours() * claimsPerHour[n.name] * share)
	}
	r.histogram("partage_prepare_duration_seconds", base.with(labels{"result": "success"}), count(1), prepares)
	r.histogram("partage_unprepare_duration_seconds", base.with(labels{"result": "success"}), count(0.98), unprepares)
	for step, at := range steps {
		share := 1.0
		if step == "mps" {
			share = 0.2
		}
		r.histogram("partage_claim_step_duration_seconds", base.with(labels{"operation": "prepare", "step": step}), count(share), at)
	}
	r.add("partage_prepare_failures_total", base.with(labels{"reason": "gpu_in_use"}), count(0.02))
	r.add("partage_unprepare_failures_total", base.with(labels{"reason": "timeout"}), count(0.01))
	r.add("partage_reconcile_errors_total", base, count(0.005))
	r.add("partage_build_info", base.with(labels{"version": "0.1.0", "goversion": "go1.26.0"}), 1)
	r.add("partage_published_slices", base, float64(n.published))
	r.add("up", base, 1)
}

// histogram writes the samples of a histogram.
func (r *recording) histogram(name string, base labels, count float64, of fractions) {
	mean, last := 0.0, 0.0
	for _, bound := range slices.Sorted(maps.Keys(of)) {
		if !math.IsInf(bound, 1) {
			mean += (of[bound] - last) * bound / 2
		}
		last = of[bound]
		r.add(name+"_bucket", base.with(labels{"le": strconv.FormatFloat(bound, 'g', -1, 64)}), math.Floor(count*last))
	}
	r.add(name+"_count", base, count)
	r.add(name+"_sum", base, count*mean)
}
