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
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/policy"
)

// spreadOver is a policy of a node in a cluster with so many ResourceSlices. The chart's
// values are the defaults.
func spreadOver(source PolicySource, node string, resourceSlices int) *PolicySpread {
	s := uncountedSpread(source, node, func(context.Context) (int, error) { return resourceSlices, nil })
	s.setSlices(resourceSlices)
	return s
}

// uncountedSpread is that of a plugin that has just started.
func uncountedSpread(source PolicySource, node string, countSlices func(context.Context) (int, error)) *PolicySpread {
	return NewPolicySpread(source, PolicySpreadOptions{
		NodeName: node, PerThousand: 40 * time.Second, Negligible: 10 * time.Second, CountSlices: countSlices,
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
		expect("a change", first)
		turn := s.turn().in
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
	turnedOff := spreadOver(nil, "node-1", 45_000)
	turnedOff.options.PerThousand = 0
	for name, s := range map[string]*PolicySpread{"a small cluster": spreadOver(nil, "node-1", 250), "turned off": turnedOff} {
		source := &fakePolicy{current: onlyWhole()}
		s.source = source
		second := withoutShares()
		_, err := s.Read(t.Context())
		source.set(second, nil)
		if got, later := s.Read(t.Context()); err != nil || later != nil || got != second {
			t.Errorf("%s: waits: %v, %v", name, err, later)
		}
	}
}

// TestPolicySpreadCountsBefore: when the policy of 1,000 nodes changes, none of them asks the API
// server how large the cluster is. They asked when they started and ask again some time, and where
// the API server has no time for them more and more rarely until it answers.
func TestPolicySpreadCountsBefore(t *testing.T) {
	const nodes = 1_000
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		var asked, busy atomic.Int32
		busy.Store(1)
		countSlices := func(context.Context) (int, error) {
			asked.Add(1)
			if busy.Load() != 0 {
				return 0, errors.New("busy")
			}
			return 9 * nodes, nil
		}
		source := &fakePolicy{current: onlyWhole()}
		var all []*PolicySpread
		for i := range nodes {
			s := uncountedSpread(source, fmt.Sprintf("node-%d", i), countSlices)
			all = append(all, s)
			running.Go(func() { s.Run(ctx) })
		}
		wantAsked := func(when string, least, most int32) {
			t.Helper()
			synctest.Wait()
			if got := asked.Swap(0); got < least || got > most {
				t.Errorf("%s: %d requests, want %d to %d", when, got, least, most)
			}
		}
		// follow lets time pass and returns how many nodes have followed to a policy.
		follow := func(d time.Duration, want *policy.Policy) (followed int) {
			t.Helper()
			for began := time.Now(); ; time.Sleep(10 * time.Second) {
				followed = 0
				for _, s := range all {
					if got, err := s.Read(ctx); err != nil {
						t.Fatal(err)
					} else if got == want {
						followed++
					}
				}
				if time.Since(began) >= d {
					return followed
				}
			}
		}
		follow(0, nil)
		time.Sleep(15 * time.Second)
		wantAsked("half of the first half a minute", nodes*2/5, nodes*3/4)
		time.Sleep(5 * time.Minute)
		wantAsked("a busy API server", nodes*3, nodes*8)
		time.Sleep(time.Hour)
		wantAsked("a busy API server for an hour", nodes*3, nodes*13)

		second := withoutShares()
		source.set(second, nil)
		if got := follow(5*time.Minute, second); got < nodes*2/5 || got > nodes*3/5 {
			t.Errorf("it is not known how large the cluster is: %d of %d nodes have followed after 5 minutes", got, nodes)
		}
		busy.Store(0)
		if got := follow(6*time.Minute, second); got != nodes {
			t.Errorf("%d of %d nodes have followed after 11 minutes", got, nodes)
		}
		time.Sleep(30 * time.Minute)
		wantAsked("the API server answers", nodes, nodes*2)

		third := onlyWhole()
		source.set(third, nil)
		if got := follow(3*time.Minute, third); got < nodes*2/5 || got > nodes*3/5 {
			t.Errorf("%d of %d nodes have followed after 3 of 6 minutes", got, nodes)
		}
		if got := follow(3*time.Minute+10*time.Second, third); got != nodes {
			t.Errorf("%d of %d nodes have followed after 6 minutes", got, nodes)
		}
		wantAsked("the policy has changed", 0, 0)
		time.Sleep(9 * time.Hour)
		wantAsked("9 hours", nodes, nodes*2)
	})
}

// TestPolicySpreadOfCluster: of 5,000 nodes with 8 GPUs each, about as many follow in
// every minute, and all of them within half an hour. Any cluster is bounded.
func TestPolicySpreadOfCluster(t *testing.T) {
	const nodes = 5_000
	perMinute := map[int]int{}
	for n := range nodes {
		delay := spreadOver(nil, fmt.Sprintf("gpu-worker-%04d", n), nodes*9).turn().in
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
		"unknown": {position: 1, options: PolicySpreadOptions{PerThousand: time.Second}},
	} {
		if delay := s.turn().in; delay <= 0 || delay > longestSpread {
			t.Errorf("%s: waits for %s", name, delay)
		}
	}
}

// TestCountSlices asks for the metadata of one ResourceSlice, whatever there is.
func TestCountSlices(t *testing.T) {
	answer := `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"remainingItemCount":44999,"continue":"x"},"items":[{}]}`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/resourceslices") || r.URL.Query().Get("limit") != "1" || r.URL.Query().Has("fieldSelector") ||
			!strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList") {
			t.Errorf("request %s, %s", r.URL, r.Header.Get("Accept"))
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, answer)
	}))
	defer server.Close()
	client, err := metadata.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	const none, unknown = `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","items":[]}`,
		`{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"continue":"x"},"items":[{}]}`
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
