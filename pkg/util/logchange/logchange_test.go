// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package logchange

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// logged returns a context and what is logged with it.
func logged(t *testing.T) (context.Context, func() []string) {
	t.Helper()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the logger has no buffer")
	}
	return klog.NewContext(t.Context(), logger), func() []string {
		var lines []string
		for _, entry := range sink.GetBuffer().Data() {
			line := entry.Message + fmt.Sprint(entry.ParameterKVList)
			if entry.Err != nil {
				line += ": " + entry.Err.Error()
			}
			lines = append(lines, line)
		}
		return lines
	}
}

func TestValue(t *testing.T) {
	var v Value[string]
	for i, step := range []struct {
		value string
		want  bool
	}{{"", false}, {"one", true}, {"one", false}, {"two", true}, {"", true}, {"", false}} {
		if got := v.Set(step.value); got != step.want {
			t.Errorf("step %d, %q: changed is %v, want %v", i, step.value, got, step.want)
		}
	}
}

func TestProblem(t *testing.T) {
	ctx, lines := logged(t)
	var p, quiet Problem
	for _, err := range []error{nil, errors.New("one"), errors.New("one"), errors.New("two"), nil, nil, errors.New("two")} {
		p.Log(ctx, err, "Failed", "Resolved", "pool", "node-1")
		quiet.Log(ctx, err, "Quiet", "")
	}
	want := []string{
		"Failed[pool node-1]: one", "Quiet[]: one",
		"Failed[pool node-1]: two", "Quiet[]: two",
		"Resolved[pool node-1]",
		"Failed[pool node-1]: two", "Quiet[]: two",
	}
	if diff := cmp.Diff(want, lines()); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}

// TestPatience: what fails for a moment is no error, and one line however it fails. What lasts is one.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, lines := logged(t)
		p := Problem{Patience: time.Minute}
		for _, step := range []struct {
			err   error
			after time.Duration
		}{
			{errors.New("one"), 0},
			{errors.New("two"), 30 * time.Second},
			{nil, 20 * time.Second},
			{errors.New("three"), time.Hour},
			{errors.New("three"), 59 * time.Second},
			{errors.New("three"), time.Second},
			{errors.New("three"), time.Hour},
			{errors.New("four"), time.Hour},
			{nil, time.Second},
			{errors.New("five"), time.Second},
		} {
			time.Sleep(step.after)
			p.Log(ctx, step.err, "Failed", "Resolved", "pool", "node-1")
		}
		want := []string{
			"Failed[err one pool node-1]", "Resolved[pool node-1]",
			"Failed[err three pool node-1]", "Failed[pool node-1]: three", "Failed[pool node-1]: four", "Resolved[pool node-1]",
			"Failed[err five pool node-1]",
		}
		if diff := cmp.Diff(want, lines()); diff != "" {
			t.Errorf("lines (-want +got):\n%s", diff)
		}
	})
}

func TestSet(t *testing.T) {
	type entry struct{ key, text string }
	var s Set[string, entry]
	for i, step := range []struct{ now, appeared []entry }{
		{},
		{now: []entry{{"b", "1"}, {"a", "1"}, {"b", "again"}}, appeared: []entry{{"b", "1"}, {"a", "1"}}},
		{now: []entry{{"a", "reworded"}, {"b", "1"}}},
		{now: []entry{{"c", "1"}}, appeared: []entry{{"c", "1"}}},
		{},
		{now: []entry{{"a", "1"}}, appeared: []entry{{"a", "1"}}},
		{},
	} {
		appeared := s.Update(step.now, func(e entry) string { return e.key })
		if diff := cmp.Diff(step.appeared, appeared, cmp.AllowUnexported(entry{})); diff != "" {
			t.Errorf("step %d: appeared (-want +got):\n%s", i, diff)
		}
	}
}

// TestConcurrently: of any number of goroutines with the same news one reports it.
func TestConcurrently(t *testing.T) {
	ctx, lines := logged(t)
	var (
		v       Value[int]
		p       Problem
		s       Set[int, int]
		wg      sync.WaitGroup
		mu      sync.Mutex
		changes int
	)
	for range 50 {
		wg.Go(func() {
			valueChanged := v.Set(1)
			p.Log(ctx, errors.New("one"), "Failed", "Resolved")
			appeared := s.Update([]int{1}, func(n int) int { return n })
			mu.Lock()
			defer mu.Unlock()
			for _, changed := range []bool{valueChanged, len(appeared) > 0} {
				if changed {
					changes++
				}
			}
		})
	}
	wg.Wait()
	if changes != 2 {
		t.Errorf("%d changes are reported, want one each", changes)
	}
	if got := lines(); len(got) != 1 {
		t.Errorf("lines: %q", got)
	}
}
