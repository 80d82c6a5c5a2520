// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

func usersFinder(t *testing.T, listed ...gpu.Process) *UsersFinder {
	t.Helper()
	f := &UsersFinder{
		Finder:  finder(t),
		List:    func(context.Context, string) ([]gpu.Process, error) { return listed, nil },
		Ignored: func(namespace string) bool { return namespace == "monitoring" },
	}
	f.PodName = func(_ context.Context, _, uid string) string { return map[string]string{podUID: "team/train"}[uid] }
	return f
}

// startedAt says when a process was started.
func (f *UsersFinder) startedAt(t *testing.T, pid, start int) {
	t.Helper()
	write(t, filepath.Join(f.Proc, strconv.Itoa(pid)), "stat",
		strconv.Itoa(pid)+" (a ) name) S "+strings.Repeat("0 ", 18)+strconv.Itoa(start)+" 0 0\n")
}

func (f *UsersFinder) end(t *testing.T, pid int) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(f.Proc, strconv.Itoa(pid))); err != nil {
		t.Fatal(err)
	}
}

func query() Query { return Query{PCIAddress: pci, Now: time.Hour} }

// TestUsers shows who counts as a user of a GPU that no claim explains.
func TestUsers(t *testing.T) {
	t.Parallel()
	const outside = "0::/system.slice/dcgm.service"
	for name, test := range map[string]struct {
		cgroup string
		listed []gpu.Process
		open   []string
		change func(*UsersFinder, *Query)
		want   Users
	}{
		"memory": {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: -1}}, nil, nil, Users{Memory: true, Text: "process 5004711 (train, pod team/train, container 0123456789abc)"}},
		"an open node": {inPodCgroup, nil, []string{"/dev/nvidia2"}, nil, Users{
			Open: true, Text: "process 5004711 (train, pod team/train, container 0123456789abc, has /dev/nvidia2 open)",
		}},
		"another GPU's node": {inPodCgroup, nil, []string{"/dev/nvidia3", "/dev/nvidiactl"}, nil, Users{}},
		"outside of pods":    {outside, []gpu.Process{{PID: 5004711, InstanceID: -1}}, []string{"/dev/nvidia2"}, nil, Users{}},
		"explained by a claim": {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: -1}}, []string{"/dev/nvidia2"}, func(_ *UsersFinder, q *Query) {
			q.Explained = func(uid string) bool { return uid == podUID }
		}, Users{}},
		"of a namespace that is ignored": {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: -1}}, nil, func(f *UsersFinder, _ *Query) {
			f.PodName = func(context.Context, string, string) string { return "monitoring/dcgm" }
		}, Users{}},
		"of a pod that nobody knows": {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: -1}}, nil, func(f *UsersFinder, _ *Query) {
			f.PodName = func(context.Context, string, string) string { return "" }
		}, Users{Memory: true, Text: "process 5004711 (train, pod with UID " + podUID + ", container 0123456789abc)"}},
		"beside an observer": {inPodCgroup, nil, []string{"/dev/nvidia2"}, func(_ *UsersFinder, q *Query) { q.Observed = true }, Users{}},
		"on an instance":     {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: 7}}, nil, nil, Users{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, q := usersFinder(t, test.listed...), query()
			f.run(t, 5004711, "train", test.cgroup, test.open...)
			if test.change != nil {
				test.change(f, &q)
			}
			got := f.Users(t.Context(), q)
			if got.Undivided != test.want || got.Unknown != nil {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			if on := name == "on an instance"; got.Instances[7].Memory != on {
				t.Errorf("on the instance: %+v", got.Instances)
			}
		})
	}
}

// TestOpenNodeInTime shows for how long an open node counts, and that a process that had it open before the claim does not
// count, but one that got its ID does: a monitor that is started again in the middle of a claim.
func TestOpenNodeInTime(t *testing.T) {
	t.Parallel()
	f := usersFinder(t)
	f.run(t, 5004711, "monitor", inPodCgroup, "/dev/nvidia2")
	f.startedAt(t, 5004711, 100)
	if err := f.Remember("u1", pci); err != nil {
		t.Fatal(err)
	}
	want := func(when string, now time.Duration, open, overdue bool) {
		t.Helper()
		q := query()
		q.Now = now
		got := f.Users(t.Context(), q)
		if got.Undivided.Open != open || (got.Undivided.Overdue != "") != overdue || got.Unknown != nil {
			t.Errorf("%s: got %+v", when, got)
		}
	}
	want("it had the node open before", time.Hour, false, false)
	f.end(t, 5004711)
	f.run(t, 5004711, "monitor", inPodCgroup, "/dev/nvidia2")
	f.startedAt(t, 5004711, 200)
	want("it was started again", time.Hour, true, false)
	want("it stays", time.Hour+openLimit-1, true, false)
	want("it stays for long", time.Hour+openLimit, false, true)
	f.end(t, 5004711)
	want("it has ended", 2*time.Hour, false, false)
	f.run(t, 5004711, "monitor", inPodCgroup, "/dev/nvidia2")
	f.startedAt(t, 5004711, 300)
	want("another one", 2*time.Hour, true, false)
	if err := f.Remember("u2", pci); err != nil {
		t.Fatal(err)
	}
	want("it had the node open before the next claim", 2*time.Hour, false, false)
	f.Forget("u2")
	want("that claim has ended", 2*time.Hour, true, false)
}

// TestUsersUnknown shows that what could not be looked at is said, and that the driver's list decides then: a tenant with so
// many descriptors that they cannot be read in time.
func TestUsersUnknown(t *testing.T) {
	t.Parallel()
	f := usersFinder(t, gpu.Process{PID: 5004711, InstanceID: -1})
	f.run(t, 5004711, "train", inPodCgroup, "/dev/nvidia2")
	started, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	go func() {
		_, _ = f.looks.Do("users of nvidia2", time.Hour, func() ([]process, error) {
			close(started)
			<-release
			return nil, nil
		})
	}()
	<-started
	got := f.Users(t.Context(), query())
	if !got.Undivided.Memory || got.Undivided.Open || got.Unknown == nil || !strings.Contains(got.Unknown.Error(), "could not be read within 1s") {
		t.Errorf("got %+v", got)
	}
	f.List = func(context.Context, string) ([]gpu.Process, error) { return nil, gpu.ErrLost }
	if got := f.Users(t.Context(), query()); !errors.Is(got.Unknown, gpu.ErrLost) {
		t.Errorf("got %+v", got)
	}
}
