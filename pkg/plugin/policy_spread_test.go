// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/partage-dev/partage/pkg/policy"
)

// spreadOver is a policy of a node in a cluster with so many ResourceSlices. The chart's
// values are the defaults.
func spreadOver(source PolicySource, node string, resourceSlices int) *PolicySpread {
	return NewPolicySpread(source, PolicySpreadOptions{
		NodeName: node, PerThousand: 40 * time.Second, Negligible: 10 * time.Second,
		CountSlices: func(context.Context) (int, error) { return resourceSlices, nil },
	})
}

// TestPolicySpread: a node follows a changed policy when it is its turn.
func TestPolicySpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &fakePolicy{}
		s := spreadOver(source, "node-1", 45_000)
		expect := func(when string, want *policy.Policy) {
			t.Helper()
			if got, err := s.Read(t.Context()); err != nil || got != want {
				t.Errorf("%s: %p, %v, want %p", when, got, err, want)
			}
		}
		first, second, third := onlyWhole(), withoutShares(), policy.Builtin()
		source.set(first, nil)
		expect("the first policy", first)

		source.set(second, nil)
		start := time.Now()
		expect("a change", first)
		turn := s.due.Sub(start)
		if turn < time.Minute || turn > 30*time.Minute {
			t.Fatalf("the node follows after %s of 30 minutes", turn)
		}
		time.Sleep(turn / 2)
		source.set(third, nil)
		expect("another change", first)
		time.Sleep(turn/2 - time.Second)
		expect("just before its turn", first)
		time.Sleep(time.Second)
		expect("at its turn", third)
		expect("later", third)

		source.set(second, nil)
		expect("the next change", third)
		source.set(policy.Builtin(), nil)
		if got, err := s.Read(t.Context()); err != nil || got == third || s.next != nil {
			t.Errorf("changed back: %p, %v, waits for %p", got, err, s.next)
		}

		source.set(second, nil)
		expect("a change", s.current)
		source.set(nil, errors.New("odd"))
		if got, err := s.Read(t.Context()); err == nil || got != nil {
			t.Errorf("invalid: %p, %v", got, err)
		}
		time.Sleep(time.Hour)
		source.set(second, nil)
		expect("valid again", s.current)
		time.Sleep(turn)
		expect("at its turn", second)
	})
}

// TestPolicySpreadAtOnce: where waiting is of no use, there is none.
func TestPolicySpreadAtOnce(t *testing.T) {
	for name, change := range map[string]func(*PolicySpreadOptions){
		"a small cluster": func(o *PolicySpreadOptions) {
			o.CountSlices = func(context.Context) (int, error) { return 250, nil }
		},
		"turned off": func(o *PolicySpreadOptions) { o.PerThousand = 0 },
	} {
		source := &fakePolicy{current: onlyWhole()}
		s := spreadOver(source, "node-1", 45_000)
		change(&s.options)
		second := withoutShares()
		_, err := s.Read(t.Context())
		source.set(second, nil)
		if got, later := s.Read(t.Context()); err != nil || later != nil || got != second {
			t.Errorf("%s: waits: %v, %v", name, err, later)
		}
	}
}

// TestPolicySpreadOfCluster: of 5,000 nodes with 8 GPUs each, about as many follow in
// every minute, and all of them within half an hour. Any cluster is bounded.
func TestPolicySpreadOfCluster(t *testing.T) {
	const nodes = 5_000
	perMinute := map[int]int{}
	for n := range nodes {
		delay := spreadOver(nil, fmt.Sprintf("gpu-worker-%04d", n), nodes*9).delay(t.Context())
		perMinute[int(delay.Minutes())]++
	}
	var counts []int
	for minute, count := range perMinute {
		if minute < 0 || minute > 30 {
			t.Errorf("%d nodes follow after %d minutes", count, minute)
		}
		if minute < 30 {
			counts = append(counts, count)
		}
	}
	if least, most := slices.Min(counts), slices.Max(counts); len(counts) != 30 || most > 3*nodes/30/2 || least < nodes/30/2 {
		t.Errorf("%d to %d nodes follow in one of %d minutes", least, most, len(counts))
	}
	for name, s := range map[string]*PolicySpread{
		"vast":    spreadOver(nil, "node-1", 10_000_000),
		"unknown": {position: 1, options: PolicySpreadOptions{PerThousand: time.Second, CountSlices: func(context.Context) (int, error) { return 0, errors.New("odd") }}},
	} {
		if delay := s.delay(t.Context()); delay <= 0 || delay > longestSpread {
			t.Errorf("%s: waits for %s", name, delay)
		}
	}
}

// TestCountSlices asks for one ResourceSlice, whatever there is.
func TestCountSlices(t *testing.T) {
	answer := `{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1","metadata":{"remainingItemCount":44999,"continue":"x"},"items":[{}]}`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/resourceslices") || r.URL.Query().Get("limit") != "1" || r.URL.Query().Has("fieldSelector") {
			t.Errorf("request %s", r.URL)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, answer)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	const none, unknown = `{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1","items":[]}`,
		`{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1","metadata":{"continue":"x"},"items":[{}]}`
	for want, text := range map[int]string{45_000: answer, 0: none} {
		answer = text
		if got, err := CountSlices(t.Context(), client); err != nil || got != want {
			t.Errorf("%d ResourceSlices, %v, want %d", got, err, want)
		}
	}
	answer = unknown
	if got, err := CountSlices(t.Context(), client); err == nil {
		t.Errorf("%d ResourceSlices, although nobody says how many", got)
	}
}
