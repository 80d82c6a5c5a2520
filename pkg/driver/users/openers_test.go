// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package users

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/must"
)

// prepared is a claim of another namespace than the pods of monitors, prepared at a time, or nothing.
func prepared(at time.Duration) []*record.Record {
	if at == 0 {
		return nil
	}
	c := claim("a", nil, pci)
	c.Arrived = at
	return []*record.Record{c}
}

// TestTexts shows how users are described.
func TestTexts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		pod    string
		memory bool
		want   string
	}{
		"memory":                     {train, true, "process 5000001 (program, pod team/train, container 0123456789abc, has /dev/nvidia2 open)"},
		"an open node":               {train, false, "process 5000001 (program, pod team/train, container 0123456789abc, has /dev/nvidia2 open)"},
		"of a pod that nobody knows": {gone, false, "process 5000001 (program, pod with UID " + gone + ", container 0123456789abc, has /dev/nvidia2 open)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.run(5000001, test.pod, time.Minute, true)
			if test.memory {
				n.listed = []gpu.Process{{PID: 5000001, InstanceID: -1}}
				test.want = strings.Replace(test.want, ", has /dev/nvidia2 open", "", 1)
			}
			if got, _, _ := n.users.Users(t.Context(), pci, nil, nil); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

// TestEnded: NVML goes on listing a process whose memory a descriptor keeps that it has sent away before its end, as seen on
// an H100. Its pod is not known any more, which is no reason to take it for a process of the node.
func TestEnded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.listed = []gpu.Process{{PID: 5000001, InstanceID: -1}}
	want := "process 5000001 (has ended, its memory is still held)"
	if got, _, _ := n.users.Users(t.Context(), pci, nil, nil); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestJustEnded: the driver takes a moment to forget a process that was killed.
func TestJustEnded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	times := 0
	n.users.List = func(context.Context, string) ([]gpu.Process, error) {
		if times++; times > 2 {
			return nil, nil
		}
		return []gpu.Process{{PID: 5000001, InstanceID: -1}}, nil
	}
	if got, _, _ := n.users.Users(t.Context(), pci, nil, nil); got != "" {
		t.Errorf("got %q", got)
	}
}

// TestOpenNodeInTime shows for how long an open node counts, and that a process that had it open before the claim does not
// count, but one that got its ID does: a monitor that is started again in the middle of a claim.
func TestOpenNodeInTime(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	monitor := func(start time.Duration) { n.run(5000001, third, start, true) }
	at := time.Duration(0)
	want := func(when string, now time.Duration, open bool) {
		t.Helper()
		n.now = now
		got, _, opened := n.users.Users(t.Context(), pci, prepared(at), nil)
		if kindOf(got) == "open" != open || kindOf(got) == "memory" {
			t.Errorf("%s: got %+v", when, got)
		}
		if told := strings.Contains(when, "for long"); kindOf(opened) == "open" != told {
			t.Errorf("%s: of those that do not count it says %q", when, opened)
		}
	}
	monitor(30 * time.Minute)
	want("nothing was prepared yet", time.Hour, true)
	want("it stays", time.Hour+openLimit-1, true)
	want("it stays for long", time.Hour+openLimit, false)
	at = 2 * time.Hour
	want("it had the node open before the claim", at+time.Minute, false)
	at = 0
	want("the claim is released", 3*time.Hour, false)

	at = 4 * time.Hour
	n.end(5000001)
	monitor(5 * time.Hour)
	want("it was started again in the middle of a claim", 5*time.Hour+time.Minute, true)
	at = 0
	want("the claim is released, and it stays", 5*time.Hour+2*time.Minute, true)
	want("it stays for long after its restart", 5*time.Hour+time.Minute+openLimit, false)
	n.end(5000001)
	want("it has ended", 6*time.Hour, false)
	monitor(6 * time.Hour)
	want("another one", 6*time.Hour, true)
}

// TestOpenNodeInChildren: processes that have a node from one another keep the GPU back for as long as one of them.
func TestOpenNodeInChildren(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	const pause = openLimit / 4
	for i := range 8 {
		n.now = time.Hour + time.Duration(i)*pause
		n.run(5000001+i, third, n.now, true)
		if i > 0 {
			n.end(5000000 + i)
		}
		got, _, _ := n.users.Users(t.Context(), pci, nil, nil)
		if want := time.Duration(i)*pause < openLimit; kindOf(got) == "open" != want {
			t.Errorf("after %s: got %+v", time.Duration(i)*pause, got)
		}
	}
}

// TestFirstObservation shows that a process of the driver that was started in the middle of a claim takes those for older than the
// claim that were running before it.
func TestFirstObservation(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		start time.Duration
		open  bool
	}{
		"older than the claim": {time.Hour - time.Second, false},
		"started after it":     {time.Hour + time.Second, true},
		"it does not tell":     {-1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.now = 2 * time.Hour
			n.run(5000001, third, test.start, true)
			if test.start < 0 {
				must.Do(t, os.Remove(filepath.Join(n.dir, "processes/5000001/stat")))
			}
			look := func() string {
				got, _, _ := n.users.Users(t.Context(), pci, prepared(time.Hour), nil)
				return got
			}
			for range 2 {
				if got := look(); kindOf(got) == "open" != test.open {
					t.Errorf("got %+v", got)
				}
			}
			n.run(5000002, third, time.Minute, true)
			if got := look(); !strings.Contains(got, "5000002") {
				t.Errorf("an old process that opens the node later: got %+v", got)
			}
		})
	}
}

// TestManyUsers shows that a text does not grow with what a tenant starts.
func TestManyUsers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for pid := range 40 {
		n.listed = append(n.listed, gpu.Process{PID: 5000001 + pid, InstanceID: -1})
		n.run(5000001+pid, train, 0, false)
	}
	if got, _, _ := n.users.Users(t.Context(), pci, nil, nil); strings.Count(got, "process") != shown || !strings.HasSuffix(got, ", and 35 more") {
		t.Errorf("got %s", got)
	}
}

// TestOpenersUnknown shows that the driver's list decides where nobody knows who has the node open, unless the GPU has an
// orphan and there is no list: then that nobody knows who uses it is said.
func TestOpenersUnknown(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.listed = []gpu.Process{{PID: 5000001, InstanceID: -1}}
	n.run(5000001, train, 0, true)
	must.Do(t, os.RemoveAll(filepath.Join(n.dir, "driver")))
	if got, _, _ := n.users.Users(t.Context(), pci, nil, nil); kindOf(got) != "memory" {
		t.Errorf("got %+v", got)
	}
	n.listed, n.listError = nil, gpu.ErrNotSupported
	if got, _, _ := n.users.Users(t.Context(), pci, nil, nil); got != "" {
		t.Errorf("without a list: got %+v", got)
	}
	if got, _, _ := n.users.Users(t.Context(), pci, nil, claim("o", nil, pci)); kindOf(got) != "memory" || !strings.Contains(got, "is not known") {
		t.Errorf("without a list, with an orphan: got %+v", got)
	}
}

// TestUsersBesideOrphan shows who keeps an orphan: everybody whose presence no other claim explains.
func TestUsersBesideOrphan(t *testing.T) {
	t.Parallel()
	whole, part := claim("o", nil, pci), claim("o", onInstance(7), pci)
	for name, test := range map[string]struct {
		pod             string
		listed          []int
		err, supervisor error
		open            bool
		server          bool
		claims          []*record.Record
		orphan          *record.Record
		// undivided and partition are whether the GPU and its instance 7 are in use.
		undivided, partition bool
	}{
		"nobody":                             {orphan: whole},
		"outside of pods":                    {listed: []int{-1}, orphan: whole, undivided: true},
		"of a namespace that is ignored":     {pod: dcgm, listed: []int{-1}, orphan: whole, undivided: true},
		"of the orphan's namespace":          {pod: train, listed: []int{-1}, orphan: whole, undivided: true},
		"on the partition":                   {listed: []int{7}, orphan: part, partition: true},
		"on another partition":               {listed: []int{8}, orphan: part},
		"on no partition":                    {listed: []int{-1}, orphan: part, undivided: true, partition: true},
		"on the partition of another claim":  {pod: train, listed: []int{8}, orphan: part, claims: []*record.Record{claim("a", onInstance(8), pci)}},
		"its pod observes the GPU":           {pod: train, listed: []int{-1}, orphan: whole, claims: []*record.Record{claim("a", observing, pci)}, undivided: true},
		"an MPS server":                      {pod: own, listed: []int{-1}, server: true, orphan: whole},
		"an MPS server that nobody knows":    {pod: own, listed: []int{-1}, supervisor: errors.New("away"), orphan: whole, undivided: true},
		"a node that the node has open":      {open: true, orphan: whole},
		"a node, the driver cannot list":     {open: true, err: gpu.ErrNotSupported, orphan: whole, undivided: true},
		"a partition, the driver cannot say": {open: true, err: gpu.ErrNotSupported, orphan: part, undivided: true, partition: true},
		"the driver does not say":            {err: gpu.ErrHung, orphan: part, undivided: true, partition: true},
		"another GPU's orphan":               {listed: []int{-1}, orphan: claim("o", nil, other)},
		"an orphan that observes":            {listed: []int{-1}, orphan: claim("o", observing, pci)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.run(5000001, test.pod, 0, test.open)
			for _, at := range test.listed {
				n.listed = append(n.listed, gpu.Process{PID: 5000001, InstanceID: at})
			}
			n.listError = test.err
			n.users.Servers = func(context.Context) ([]int, error) {
				if test.server {
					return []int{5000001}, nil
				}
				return nil, test.supervisor
			}
			got, instances, _ := n.users.Users(t.Context(), pci, test.claims, test.orphan)
			if got != "" != test.undivided || instances[7] != "" != test.partition {
				t.Errorf("got %+v and %+v", got, instances)
			}
		})
	}
}
