// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestTimes: with all that it may take, each step included, a run is over before nine minutes.
func TestTimes(t *testing.T) {
	p := &plan{options: &options{}, mps: true}
	var sum time.Duration
	for _, s := range p.all() {
		sum += s.limit
	}
	if len(p.all()) != 4 || sum > defaultBudget-endTime || defaultBudget+graceLimit >= 9*time.Minute {
		t.Errorf("%d steps take up to %s, the budget is %s", len(p.all()), sum, defaultBudget)
	}
	p.mps = false
	if len(p.all()) != 2 {
		t.Errorf("%d steps without MPS, want 2", len(p.all()))
	}
}

// TestTake: a step that hangs is left after its time, and what the machine does not allow is no
// failure.
func TestTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &plan{options: &options{}, stdout: &strings.Builder{}}
		for _, s := range []step{
			{"hangs", time.Minute, func(ctx context.Context) (string, error) {
				<-ctx.Done()
				return "", ctx.Err()
			}},
			{"cannot", time.Minute, func(context.Context) (string, error) { return "", fmt.Errorf("%w: no right", errCannot) }},
			{"fails", time.Minute, func(context.Context) (string, error) { return "", errors.New("it is broken") }},
			{"works", time.Minute, func(context.Context) (string, error) { return "all is well", nil }},
		} {
			p.take(t.Context(), s)
		}
		want := []outcome{
			{"hangs", "not finished in time: context deadline exceeded", "1m0s", false},
			{"cannot", "could not be tried: no right", "0s", true},
			{"fails", "it is broken", "0s", false},
			{"works", "all is well", "0s", true},
		}
		for i := range want {
			if p.steps[i] != want[i] {
				t.Errorf("got %+v, want %+v", p.steps[i], want[i])
			}
		}
	})
}

// TestBudget: a time in which nothing could be done is refused.
func TestBudget(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run(t.Context(), []string{"--budget=30s"}, &stdout, &stderr); code != exitCannot || !strings.Contains(stderr.String(), "--budget is 30s: want at least 1m10s") {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
}

// TestNeverIntrusive: no step may change a setting.
func TestNeverIntrusive(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run(t.Context(), []string{"--intrusive"}, &stdout, &stderr); code != exitCannot || !strings.Contains(stderr.String(), "not defined: -intrusive") {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
}
