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
func (f *UsersFinder) startedAt(t *testing.T, pid int, start time.Duration) {
	t.Helper()
	write(t, filepath.Join(f.Proc, strconv.Itoa(pid)), "stat",
		strconv.Itoa(pid)+" (a ) name) S "+strings.Repeat("0 ", 18)+strconv.Itoa(int(start/tick))+" 0 0\n")
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
			q.Explained = func(_ context.Context, s Suspect) bool { return s.PodUID == podUID }
		}, Users{}},
		"explained where it is, and not with the node alone": {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: -1}}, []string{"/dev/nvidia2"}, func(_ *UsersFinder, q *Query) {
			q.Explained = func(_ context.Context, s Suspect) bool {
				return s == Suspect{PID: 5004711, PodUID: podUID, Namespace: "team", Memory: true, InstanceID: -1}
			}
		}, Users{}},
		"explained elsewhere": {inPodCgroup, []gpu.Process{{PID: 5004711, InstanceID: -1}}, nil, func(_ *UsersFinder, q *Query) {
			q.Explained = func(_ context.Context, s Suspect) bool { return s.InstanceID == 7 }
		}, Users{Memory: true, Text: "process 5004711 (train, pod team/train, container 0123456789abc)"}},
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
			if got.Undivided != test.want || got.Unlisted != nil || got.Unopened != nil {
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
	monitor := func(start time.Duration) {
		t.Helper()
		f.run(t, 5004711, "monitor", inPodCgroup, "/dev/nvidia2")
		f.startedAt(t, 5004711, start)
	}
	prepared := time.Duration(0)
	want := func(when string, now time.Duration, open, overdue bool) {
		t.Helper()
		q := query()
		q.Now, q.Prepared = now, prepared
		got := f.Users(t.Context(), q)
		if got.Undivided.Open != open || (got.Undivided.Overdue != "") != overdue || got.Unlisted != nil || got.Unopened != nil {
			t.Errorf("%s: got %+v", when, got)
		}
	}
	monitor(30 * time.Minute)
	want("nothing was prepared yet", time.Hour, true, false)
	want("it stays", time.Hour+openLimit-1, true, false)
	want("it stays for long", time.Hour+openLimit, false, true)
	prepared = 2 * time.Hour
	want("it had the node open before the claim", prepared+time.Minute, false, false)
	prepared = 0
	want("the claim is released", 3*time.Hour, false, false)

	prepared = 4 * time.Hour
	f.end(t, 5004711)
	monitor(5 * time.Hour)
	want("it was started again in the middle of a claim", 5*time.Hour+time.Minute, true, false)
	prepared = 0
	want("the claim is released, and it stays", 5*time.Hour+2*time.Minute, true, false)
	want("it stays for long after its restart", 5*time.Hour+time.Minute+openLimit, false, true)
	f.end(t, 5004711)
	want("it has ended", 6*time.Hour, false, false)
	monitor(6 * time.Hour)
	want("another one", 6*time.Hour, true, false)
}

// TestFirstLook shows that a process of the driver that was started in the middle of a claim takes those for older than the
// claim that were running before it.
func TestFirstLook(t *testing.T) {
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
			f, q := usersFinder(t), query()
			q.Prepared, q.Now = time.Hour, 2*time.Hour
			f.run(t, 5004711, "monitor", inPodCgroup, "/dev/nvidia2")
			if test.start >= 0 {
				f.startedAt(t, 5004711, test.start)
			}
			for range 2 {
				if got := f.Users(t.Context(), q); got.Undivided.Open != test.open {
					t.Errorf("got %+v", got)
				}
			}
			f.run(t, 5004712, "late", inPodCgroup, "/dev/nvidia2")
			f.startedAt(t, 5004712, time.Minute)
			if got := f.Users(t.Context(), q); !strings.Contains(got.Undivided.Text, "5004712") {
				t.Errorf("an old process that opens the node later: got %+v", got)
			}
		})
	}
}

// TestManyUsers shows that a text does not grow with what a tenant starts.
func TestManyUsers(t *testing.T) {
	t.Parallel()
	var listed []gpu.Process
	for pid := range 40 {
		listed = append(listed, gpu.Process{PID: 5004711 + pid, InstanceID: -1})
	}
	f := usersFinder(t, listed...)
	for _, p := range listed {
		f.run(t, p.PID, "train", inPodCgroup)
	}
	if got := f.Users(t.Context(), query()).Undivided.Text; strings.Count(got, "process") != shown || !strings.HasSuffix(got, ", and 35 more") {
		t.Errorf("got %s", got)
	}
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
	if !got.Undivided.Memory || got.Undivided.Open || got.Unopened == nil || !strings.Contains(got.Unopened.Error(), "could not be read within 1s") {
		t.Errorf("got %+v", got)
	}
	f.List = func(context.Context, string) ([]gpu.Process, error) { return nil, gpu.ErrLost }
	if got := f.Users(t.Context(), query()); !errors.Is(got.Unlisted, gpu.ErrLost) {
		t.Errorf("got %+v", got)
	}
	f.List = func(context.Context, string) ([]gpu.Process, error) { return nil, gpu.ErrNotSupported }
	if got := f.Users(t.Context(), query()); got.Unlisted != nil {
		t.Errorf("got %+v", got)
	}
}
