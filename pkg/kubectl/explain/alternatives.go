// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// ofClaim gives the reasons of a claim's requests. Of a request with alternatives none is a reason as
// long as one of them would do.
func (q *inquiry) ofClaim(ctx context.Context, j *judge, c *resourceapi.ResourceClaim) {
	does, reasons := sets.New[int](), map[int][]Reason{}
	before := q.Reasons
	for _, a := range asksOf(c) {
		q.Reasons = nil
		q.ofRequest(ctx, j, a)
		if !slices.ContainsFunc(q.Reasons, Reason.refuses) {
			does.Insert(a.position.request)
		}
		reasons[a.position.request] = append(reasons[a.position.request], q.Reasons...)
	}
	q.Reasons = before
	for i := range c.Spec.Devices.Requests {
		for _, r := range reasons[i] {
			if !r.refuses() || !does.Has(i) {
				q.Reasons = append(q.Reasons, r)
			}
		}
	}
}

// refuses reports whether a reason of a request is about all devices that could do, not about a
// pool that is not whole.
func (r Reason) refuses() bool { return r.Cause != PoolIncomplete && r.Cause != PoolInvalid }
