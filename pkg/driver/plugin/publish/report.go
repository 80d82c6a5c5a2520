// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

// usualTime is how long slices that were right once may be wrong before that is
// reported: an API server restarts in less.
const usualTime = 30 * time.Second

// reporting is what was reported, and what decides about the next report.
type reporting struct {
	// confirmed means that all slices were stored at some time, and wrongSince is since when they are not.
	confirmed  bool
	wrongSince time.Time
	// failure is why the last request has failed, or nil.
	failure    error
	published  logchange.Value[string]
	precedence logchange.Problem
}

// note notes whether everything is stored, and returns since when it is not.
func (s *reporting) note(published bool) time.Duration {
	switch {
	case published:
		s.wrongSince = time.Time{}
	case s.wrongSince.IsZero():
		s.wrongSince = time.Now()
	}
	return time.Since(s.wrongSince)
}

// report says whether the slices are stored, and returns when there is more to report or to do. After all slices were stored once, it
// reports a failure only if it lasts: usually the next request succeeds.
func (p *Publisher) report(ctx context.Context, plan *rules.Plan) (next rules.Time) {
	s, since := &p.reporting, p.reporting.note(plan.Published)
	if plan.Published {
		if devices := countDevices(p.stored.Slices); s.published.Set(fmt.Sprint(len(p.stored.Slices), devices)) {
			klog.FromContext(ctx).Info("Published", "resourceSlices", len(p.stored.Slices), "devices", devices)
		}
		s.confirmed = true
		p.Report(ctx, "")
		return plan.Next
	}
	if s.confirmed && since < usualTime {
		return min(plan.Next, p.now()+usualTime-since)
	}
	s.published.Set("")
	reason := s.failure
	if reason == nil {
		reason = fmt.Errorf("of %d, %d are missing and %d have other content; somebody else changes them again and again", len(p.wanted.Slices), plan.Missing, plan.Wrong)
	}
	p.Report(ctx, fmt.Sprintf("the ResourceSlices are not in the API server as they should be: %v", reason))
	return plan.Next
}

// isMine reports whether no newer instance publishes.
func (p *Publisher) isMine(ctx context.Context) bool {
	newest, err := p.precedence.Mine()
	// Without locks there is nothing better than to publish.
	p.reporting.precedence.Log(ctx, err, "It is not known whether a newer instance of the plugin runs, publishing as if there were none", "")
	mine, was := newest || err != nil, !p.notMine
	switch p.notMine = !mine; {
	case mine && !was:
		p.memory.Reread()
		klog.FromContext(ctx).Info("The newer instance of the plugin has ended, publishing again")
	case !mine && was:
		p.Observe(0, nil)
		p.reporting.note(true)
		klog.FromContext(ctx).Info("A newer instance of the plugin publishes the ResourceSlices of this node")
		if !p.reporting.confirmed {
			p.Report(ctx, "a newer instance of the plugin on this node publishes")
		}
	}
	return mine
}
