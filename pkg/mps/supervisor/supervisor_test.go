// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

func TestSession(t *testing.T) {
	w, s := supervised(t)
	spec := mps.Spec{
		ID: "gpu-0", Devices: []string{gpuA, gpuB}, ThreadPercentage: 25, MultiUser: true,
		Memory: map[string]int64{gpuA: 10 << 30, gpuB: 1500<<20 + 7},
	}
	got, err := s.Ensure(t.Context(), spec)
	must.Do(t, err)
	want := mps.Status{Spec: spec, Phase: mps.Running, PipeDir: w.dir + "/gpu-0/pipe/client", ShmDir: w.dir + "/gpu-0/memory/shm"}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(mps.Status{}, "Servers")); diff != "" || len(got.Servers) != 1 {
		t.Errorf("servers %v, -want +got:\n%s", got.Servers, diff)
	}
	if again, err := s.Ensure(t.Context(), spec); err != nil || !cmp.Equal(got, again) {
		t.Errorf("again: %v, %s", err, cmp.Diff(got, again))
	}

	// The daemon's /dev/shm is the session's.
	var seen map[string]string
	data, err := os.ReadFile(filepath.Join(got.ShmDir, "seen.json"))
	if err == nil {
		err = json.Unmarshal(data, &seen)
	}
	wantSeen := map[string]string{
		"args": "-f -multiuser-server", "CUDA_VISIBLE_DEVICES": gpuA + "," + gpuB, "CUDA_MPS_PIPE_DIRECTORY": w.dir + "/gpu-0/pipe/daemon",
		"LD_LIBRARY_PATH": seen["LD_LIBRARY_PATH"],
	}
	if diff := cmp.Diff(wantSeen, seen); err != nil || diff != "" || !strings.Contains(seen["LD_LIBRARY_PATH"], w.root+"/usr/lib64") {
		t.Errorf("the daemon saw: %v, -want +got:\n%s\n%s", err, diff, seen["LD_LIBRARY_PATH"])
	}
	var st unix.Statfs_t
	if err := unix.Statfs(got.ShmDir, &st); err != nil || st.Type != unix.TMPFS_MAGIC || st.Flags&unix.ST_NODEV == 0 || st.Flags&unix.ST_NOSUID == 0 {
		t.Errorf("shm: %v, type %x, flags %x", err, st.Type, st.Flags)
	}
	if info, err := os.Stat(got.ShmDir); err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("shm has mode %v, %v", info.Mode(), err)
	}

	for range 2 {
		expect.Do(t, s.Stop(t.Context(), "gpu-0"))
	}
	w.nothingLeft("gpu-0")
	expect.Len(t, s.List(), 0, "left")
}

func TestChangeLimits(t *testing.T) {
	w, s := supervised(t)
	spec := mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25, Memory: map[string]int64{gpuA: 1 << 30}}
	first := must.Get(s.Ensure(t.Context(), spec))(t)
	raised := clone(spec)
	raised.ThreadPercentage, raised.Memory[gpuA] = 50, 3<<30
	second := must.Get(s.Ensure(t.Context(), raised))(t)
	if diff := cmp.Diff(raised, second.Spec); diff != "" || !cmp.Equal(first.Servers, second.Servers) || second.Losses != 0 {
		t.Errorf("servers %v then %v, %d losses, -want +got:\n%s", first.Servers, second.Servers, second.Losses, diff)
	}
	c := clientOf(t, s, "gpu-0")
	for _, server := range []int{0, second.Servers[0]} {
		expect.Do(t, hasLimits(t, c, server, raised), "server", server)
	}

	// Refused, and nothing is changed.
	for name, test := range map[string]struct {
		change func(*mps.Spec)
		want   string
	}{
		"devices":    {func(s *mps.Spec) { s.Devices = []string{gpuB}; s.Memory = nil }, gpuB},
		"multi-user": {func(s *mps.Spec) { s.MultiUser = true }, "multi-user"},
		"no memory":  {func(s *mps.Spec) { s.Memory = nil }, "whole memory"},
	} {
		other := clone(raised)
		test.change(&other)
		if _, err := s.Ensure(t.Context(), other); !errors.Is(err, mps.ErrDiffers) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	expect.Same(t, statusOf(t, s, "gpu-0"), second)

	// A daemon that only pretends.
	w.script(script{IgnoreServer: true})
	higher := clone(raised)
	higher.ThreadPercentage = 75
	expect.Says(t, expect.Err(s.Ensure(t.Context(), higher)), "percentage is 50, want 75")
	w.script(script{})
	if got := statusOf(t, s, "gpu-0"); !cmp.Equal(got.Spec, raised) {
		t.Errorf("got %v", got.Spec)
	}
}

// TestLimitsAreKept: root in a container can change limits, which are then restored.
func TestLimitsAreKept(t *testing.T) {
	_, s := supervised(t)
	spec := mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25}
	status := must.Get(s.Ensure(t.Context(), spec))(t)
	c := clientOf(t, s, "gpu-0")
	other := spec
	other.ThreadPercentage = 90
	must.Do(t, c.SetLimits(t.Context(), other, status.Servers[0]))
	eventually(t, "the limit to be as before", func() bool { return hasLimits(t, c, status.Servers[0], spec) == nil })
}

// TestCoarseLimits: limits that the daemon prints in whole gibibytes are in effect, and
// other ones are still noticed.
func TestCoarseLimits(t *testing.T) {
	_, s := supervised(t)
	spec := mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, Memory: map[string]int64{gpuA: 20252 << 20}}
	status := must.Get(s.Ensure(t.Context(), spec))(t)
	c, server := clientOf(t, s, "gpu-0"), status.Servers[0]
	expect.Do(t, hasLimits(t, c, server, spec))
	other := clone(spec)
	other.Memory[gpuA] = 40 << 30
	must.Do(t, c.SetLimits(t.Context(), other, server))
	eventually(t, "the limit to be as before", func() bool { return hasLimits(t, c, server, spec) == nil })
	if now := statusOf(t, s, "gpu-0"); now.Phase != mps.Running || now.Losses != 0 || now.Servers[0] != server {
		t.Errorf("the session is %+v", now)
	}
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script script
		want   []string
	}{
		"daemon ends":       {script{Exit: "no GPU of that name"}, []string{"ended: exit status 1", "no GPU of that name", "daemon.log"}},
		"server ends":       {script{NoServer: true}, []string{"exited with status 1"}},
		"daemon lies":       {script{IgnoreDefault: true}, []string{"limits of future servers are not in effect", "percentage is 100, want 25"}},
		"server lies":       {script{IgnoreServer: true, Percentage: "100.0"}, []string{"limits of the server with PID", "percentage is 100, want 25"}},
		"server is faulted": {script{State: "FAULT"}, []string{"it is faulted although it has had no clients"}},
		"daemon hangs":      {script{Hang: true}, []string{"does not answer", "too late"}},
		"daemon stays":      {script{Stay: true, IgnoreDefault: true}, []string{"not in effect"}},
		"daemon is slow":    {script{Slow: time.Minute}, []string{"does not answer", "too late"}},
	} {
		t.Run(name, func(t *testing.T) {
			w, s := supervised(t, hasty)
			w.script(test.script)
			limit := time.Minute
			if slices.Contains(test.want, "too late") {
				limit = 2 * time.Second
			}
			ctx, cancel := context.WithTimeoutCause(t.Context(), limit, errors.New("too late"))
			defer cancel()
			_, err := s.Ensure(ctx, mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25})
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range append(test.want, "MPS session gpu-0 on "+gpuA) {
				expect.Contains(t, err.Error(), want, err)
			}
			w.nothingLeft("gpu-0")
			expect.Len(t, s.List(), 0, "left")
			// And then it works.
			w.script(script{})
			expect.Do(t, expect.Err(s.Ensure(t.Context(), mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25})))
		})
	}
}

// TestServerNeverReady: what was seen of a server is said, whether the caller has no more time for
// it or there is no answer any more.
func TestServerNeverReady(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		then func(w *world, giveUp context.CancelCauseFunc)
		want string
	}{
		"too late":  {func(_ *world, giveUp context.CancelCauseFunc) { giveUp(errors.New("too late")) }, "is INITIALIZING: too late"},
		"no answer": {func(w *world, _ context.CancelCauseFunc) { w.script(script{Hang: true}) }, "no answer within"},
	} {
		t.Run(name, func(t *testing.T) {
			w, s := supervised(t, hasty, func(o *Options) { o.StartLimit = 30 * time.Second })
			w.script(script{State: "INITIALIZING"})
			ctx, giveUp := context.WithCancelCause(t.Context())
			defer giveUp(nil)
			failed := make(chan error, 1)
			go func() {
				_, err := s.Ensure(ctx, one)
				failed <- err
			}()
			// The first times are before there is a server, and its state is asked for between
			// the last two.
			eventually(t, "the servers to be listed again", func() bool {
				log, err := os.ReadFile(w.folder(one.ID).logs().path("control.log"))
				return err == nil && strings.Count(string(log), "Cmd:get_server_list") > 4
			})
			test.then(w, giveUp)
			err := <-failed
			expect.Says(t, err, test.want)
			w.nothingLeft(one.ID)
		})
	}
}

func TestNoDriver(t *testing.T) {
	w := newWorld(t)
	w.options.Roots.Driver = t.TempDir()
	s := w.supervisor()
	_, err := s.Ensure(t.Context(), mps.Spec{ID: "gpu-0", Devices: []string{gpuA}})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), programName) {
		t.Errorf("got %v", err)
	}
	w.nothingLeft("gpu-0")
}

func TestCancelledStart(t *testing.T) {
	w, s := supervised(t)
	w.script(script{Slow: time.Minute})
	ctx, cancel := context.WithCancelCause(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := s.Ensure(ctx, mps.Spec{ID: "gpu-0", Devices: []string{gpuA}})
		failed <- err
	}()
	eventually(t, "the start", func() bool { return w.keeps("gpu-0") })
	cancel(errors.New("the kubelet has hung up"))
	expect.Says(t, <-failed, "the kubelet has hung up")
	w.nothingLeft("gpu-0")
}

func TestTooLongPath(t *testing.T) {
	w := newWorld(t)
	w.options.Dir = filepath.Join(w.dir, strings.Repeat("x", 60))
	s := w.supervisor()
	if _, err := s.Ensure(t.Context(), mps.Spec{ID: "gpu-0000-1b-00-0-mig-1g10gb-4", Devices: []string{gpuA}}); !errors.Is(err, mps.ErrInvalid) ||
		!strings.Contains(err.Error(), "at most 107") {
		t.Errorf("got %v", err)
	}
}

// TestIndependent: a session that hangs does not delay others, and calls about one take
// turns.
func TestIndependent(t *testing.T) {
	w := newWorld(t)
	// For as long as the other session needs.
	w.options.CommandLimit, w.options.StartLimit = 5*time.Minute, 5*time.Minute
	s := w.supervisor()
	must.Get(s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}}))(t)
	daemon := daemonOf(t, s, "a")
	must.Do(t, unix.Kill(daemon, unix.SIGSTOP))
	stuck := make(chan error, 1)
	go func() {
		_, err := s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}, ThreadPercentage: 10})
		stuck <- err
	}()
	for range 3 {
		expect.Do(t, expect.Err(s.Ensure(t.Context(), mps.Spec{ID: "b", Devices: []string{gpuB}})))
		expect.Do(t, s.Stop(t.Context(), "b"))
	}
	select {
	case err := <-stuck:
		t.Errorf("the daemon that was stopped has answered: %v", err)
	default:
	}
	must.Do(t, unix.Kill(daemon, unix.SIGCONT))
	expect.Do(t, <-stuck)
}

func TestTurns(t *testing.T) {
	w, s := supervised(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if i%2 == 0 {
				if _, err := s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}, ThreadPercentage: 10 + i}); err != nil {
					t.Errorf("ensure: %v", err)
				}
				return
			}
			expect.Do(t, s.Stop(t.Context(), "a"), "stop")
		})
	}
	wg.Wait()
	expect.Do(t, s.Stop(t.Context(), "a"))
	w.nothingLeft("a")
}

// TestStopWhileBusy: a Stop that gives up does not leave a session without monitor.
func TestStopWhileBusy(t *testing.T) {
	_, s, _ := started(t)
	sess := locked(t, s, one.ID)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	expect.Says(t, s.Stop(ctx, one.ID), "busy")
	sess.lock.Release(1)
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Running, 1)
}

// TestStopGoesOn: what Stop could not finish is finished, by another Stop and
// without one.
func TestStopGoesOn(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]bool{"by another": true, "by itself": false} {
		t.Run(name, func(t *testing.T) {
			w, s := supervised(t)
			must.Get(s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}}))(t)
			// A mount keeps a folder busy.
			below := filepath.Join(string(w.folder("a")), "below")
			must.Do(t, errors.Join(os.Mkdir(below, 0o700), unix.Mount("below "+w.dir, below, "tmpfs", 0, "")))
			err := s.Stop(t.Context(), "a")
			if err == nil || !strings.Contains(err.Error(), "stop MPS session a") || !strings.Contains(err.Error(), "busy") {
				t.Fatalf("got %v", err)
			}
			if got := statusOf(t, s, "a"); got.Phase != mps.Failed || !strings.Contains(got.Message, "remove the folder") {
				t.Errorf("got %v", got)
			}
			must.Do(t, unix.Unmount(below, 0))
			if again {
				expect.Do(t, s.Stop(t.Context(), "a"))
			}
			eventually(t, "it to be gone", func() bool { return len(s.List()) == 0 })
			w.nothingLeft("a")
		})
	}
}
