// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rightsize

import (
	"time"

	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// Observation is what several looks at the driver's pods have shown.
type Observation struct {
	claims map[scrape.ID]*observed
	last   *scrape.Index
}

// observed is what is known of a device of a claim.
type observed struct {
	peak    *int64
	busy    *float64
	samples int
	since   time.Time
}

// NewObservation returns one that has seen nothing.
func NewObservation() *Observation {
	return &Observation{claims: map[scrape.ID]*observed{}, last: scrape.NewIndex(&scrape.Result{})}
}

// Add adds a look.
func (o *Observation) Add(r *scrape.Result) {
	o.last = scrape.NewIndex(r)
	for _, c := range r.Claims {
		seen := o.claims[c.ID]
		if seen == nil {
			seen = &observed{since: c.Since}
			o.claims[c.ID] = seen
		}
		seen.samples++
		seen.peak = larger(seen.peak, larger(c.PeakBytes, c.UsedBytes))
		seen.busy = larger(seen.busy, c.Utilization)
	}
}

func larger[T int64 | float64](a, b *T) *T {
	if a == nil || b != nil && *b > *a {
		return b
	}
	return a
}
