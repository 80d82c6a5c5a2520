// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/publish/rules"
)

// says says what is stored.
type says struct {
	report func(ctx context.Context, reason string)
	// confirmed means that everything was stored at some time, and wrongSince is when it was not any more.
	confirmed  bool
	wrongSince time.Time
	// right means that what is wanted now was stored, and failure is why the last request has failed, or nil.
	right     bool
	failure   error
	published logchange.Value[string]
}

// say reports what is stored, and returns when there is more to say or to do. What is not as it should be is said at once only
// until everything was stored once: usually the next request succeeds.
func (s *says) say(ctx context.Context, plan *rules.Plan, stored []*resourceapi.ResourceSlice, wanted int, now rules.Time) (next rules.Time) {
	if plan.Published {
		devices := 0
		for _, slice := range stored {
			devices += len(slice.Spec.Devices)
		}
		if s.published.Set(fmt.Sprint(len(stored), devices)) {
			klog.FromContext(ctx).Info("Published", "resourceSlices", len(stored), "devices", devices)
		}
		s.confirmed, s.wrongSince, s.right = true, time.Time{}, true
		s.report(ctx, "")
		return plan.Next
	}
	if since := s.wrongFor(); s.confirmed && since < usualTime {
		if at := now + usualTime - since; plan.Next == rules.Never || at < plan.Next {
			return at
		}
		return plan.Next
	}
	s.published.Set("")
	reason := s.failure
	if reason == nil {
		reason = fmt.Errorf("of %d, %d are missing and %d have other content; somebody else changes them again and again", wanted, plan.Missing, plan.Wrong)
	}
	s.report(ctx, fmt.Sprintf("the ResourceSlices are not in the API server as they should be: %v", reason))
	return plan.Next
}

// wrongFor returns for how long what is stored has not been as it should be, and from now on if it was.
func (s *says) wrongFor() time.Duration {
	if s.wrongSince.IsZero() {
		s.wrongSince = time.Now()
	}
	return time.Since(s.wrongSince)
}
