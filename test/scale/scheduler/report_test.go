// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"strings"
	"testing"
	"time"
)

// TestReport: what is printed of measured cases, and only of these.
func TestReport(t *testing.T) {
	some := []scenario{
		{load{name: "one-1g", share: 100}, "h100", nil}, {load{name: "one-1g", share: 100}, "reference", nil},
		{load{name: "slow", share: 1}, "h100", nil}, {load{name: "one-gpu", share: 100}, "h100", nil},
	}
	results := map[string]*result{
		"one-1g_h100": {podsPerSecond: 24, p99: 100 * time.Millisecond, heapPerNode: 3 << 20, usage: usage{
			process: 10 * time.Second, scheduler: 4 * time.Second, gathering: 2 * time.Second, cel: time.Second,
		}},
		"one-1g_reference": {podsPerSecond: 20, p99: 200 * time.Millisecond, heapPerNode: 4 << 20, usage: usage{
			process: 12 * time.Second, scheduler: 5 * time.Second, gathering: 4 * time.Second, cel: time.Second / 2,
		}},
		"slow_h100": {podsPerSecond: 0.5, p99: 3 * time.Second, heapPerNode: 3 << 20, usage: usage{
			process: 12 * time.Second, scheduler: 8 * time.Second, cel: 4 * time.Second,
		}},
	}
	var out strings.Builder
	if err := report(&out, some, size{nodes: 10, pods: 100}, results); err != nil {
		t.Fatal(err)
	}
	want := `
    load      fleet  pods  pods/s    p99  CPU/pod  scheduler/pod  /node  gathering   CEL  heap/node
  one-1g       h100   100    24.0  100ms    100ms           40ms    4ms       50 %  25 %    3072 KB
  one-1g  reference   100    20.0  200ms    120ms           50ms    5ms       80 %  10 %    4096 KB
    slow       h100     4     0.5     3s       3s             2s  200ms        0 %  50 %    3072 KB

  parts of reference  fleet  pods/s   p99  scheduler  heap
              one-1g   h100    1.20  0.50       0.80  0.75
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("printed:%s\nwant:%s", got, want)
	}
}
