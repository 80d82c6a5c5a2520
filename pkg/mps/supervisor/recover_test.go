// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// other is a supervisor in a process of its own.
type other struct {
	*mps.Client

	cmd *exec.Cmd
}

func (w *world) other() *other {
	w.Helper()
	return w.otherBy(superviseCommand)
}

// otherBy starts one by a command of this program.
func (w *world) otherBy(command ...string) *other {
	w.Helper()
	// What it leaves behind becomes a child of this process, as of a node's init.
	must.Do(w, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	self := must.Get(os.Executable())(w)
	o := &other{w.caller(), exec.Command(self, append(command, w.dir, w.root)...)}
	o.cmd.Stderr = os.Stderr
	must.Do(w, o.cmd.Start())
	w.Cleanup(func() { o.end(unix.SIGKILL) })
	return o
}

func (o *other) end(signal unix.Signal) {
	_ = o.cmd.Process.Signal(signal)
	_ = o.cmd.Wait()
}

// ensure waits for the supervisor to be there.
func (o *other) ensure(t *testing.T, spec mps.Spec) mps.Status {
	t.Helper()
	var status mps.Status
	eventually(t, "the supervisor to answer", func() bool {
		var err error
		status, err = o.Ensure(t.Context(), spec)
		if err != nil && !errors.Is(err, mps.ErrUnavailable) {
			t.Fatal(err)
		}
		return err == nil
	})
	return status
}

// TestSupervisorIsKilled: daemons and clients do not notice.
func TestSupervisorIsKilled(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	before := first.ensure(t, one)
	// A loss of before is known afterwards.
	kill(t, before.Servers[0])
	eventually(t, "a new server", func() bool {
		all, err := first.List(t.Context())
		if err == nil {
			before = all[0]
		}
		return err == nil && before.Losses == 1 && before.Phase == mps.Running
	})
	first.end(unix.SIGKILL)
	expect.Is(t, expect.Err(first.List(t.Context())), mps.ErrUnavailable)

	s := w.supervisor()
	after := reaches(t, s, one.ID, mps.Running, 1)
	if !slices.Equal(before.Servers, after.Servers) || before.LastLoss != after.LastLoss || !before.LastLossTime.Equal(after.LastLossTime) {
		t.Errorf("before: %v, after: %v", before, after)
	}
	// The daemon that was adopted is watched, and can be ended.
	kill(t, daemonOf(t, s, one.ID))
	after = reaches(t, s, one.ID, mps.Running, 2)
	if after.Servers[0] == before.Servers[0] {
		t.Error("the server is the same")
	}
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

// TestAllIsKilled is what happens to the supervisor's container.
func TestAllIsKilled(t *testing.T) {
	t.Parallel()
	for name, which := range map[string]func(daemon, server int) []int{
		// The server first: a daemon's end is followed by the end of its server.
		"with all":                 func(daemon, server int) []int { return []int{server, daemon} },
		"the server lives on":      func(daemon, _ int) []int { return []int{daemon} },
		"only the server is ended": func(_, server int) []int { return []int{server} },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			first := w.other()
			before := first.ensure(t, one)
			r := must.Get(w.folder(one.ID).load())(t)
			first.end(unix.SIGKILL)
			for _, pid := range which(r.Daemon.PID, r.Servers[0].PID) {
				kill(t, pid)
			}
			s := w.supervisor()
			after := reaches(t, s, one.ID, mps.Running, 1)
			if after.Servers[0] == before.Servers[0] {
				t.Error("the server is the same")
			}
			expect.Len(t, w.driverProcesses(), 2, "a daemon and a server")
			inEffect(t, s, after)
			expect.Do(t, s.Stop(t.Context(), one.ID))
			w.nothingLeft(one.ID)
		})
	}
}

// TestHandOver: the next one waits for the end of the one before, and starts again
// what that has ended.
func TestHandOver(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	before := first.ensure(t, one)
	second := w.other()
	first.end(unix.SIGTERM)
	if !first.cmd.ProcessState.Success() {
		t.Errorf("the first one: %s", first.cmd.ProcessState)
	}
	after := second.ensure(t, one)
	if after.Losses != 1 || !strings.Contains(after.LastLoss, "supervisor of the node was stopped") || after.Servers[0] == before.Servers[0] {
		t.Errorf("got %v", after)
	}
	expect.Do(t, second.Stop(t.Context(), one.ID))
	second.end(unix.SIGTERM)
	w.nothingLeft(one.ID)
}

// TestSuspended: an end in order leaves no process and no mount, which the world
// checks, and what is needed to start again.
func TestSuspended(t *testing.T) {
	w := newWorld(t)
	s := must.Get(New(context.Background(), w.options))(t)
	must.Get(s.Ensure(t.Context(), one))(t)
	expect.Do(t, s.Close(t.Context()))
	w.nothingLeft("")
	if r, err := w.folder(one.ID).load(); err != nil || r.Losses != 1 || r.Serving || r.Daemon != nil {
		t.Errorf("got %v, %v", r, err)
	}
	s = w.supervisor()
	reaches(t, s, one.ID, mps.Running, 1)
}

// TestLeftovers: whatever a supervisor was doing when it was killed, nothing of what
// is not wanted stays.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	bootID := must.Get(options("", "").Roots.BootID())(t)
	for name, leave := range map[string]func(w *world, f folder) error{
		"an empty folder": func(*world, folder) error { return nil },
		"folders, a mount on a mount, a broken record": func(_ *world, f folder) error {
			mount := func() error { return unix.Mount("t", string(f.memory()), "tmpfs", 0, "") }
			return errors.Join(f.make(), f.mount(mebibyte, ""), mount(), os.WriteFile(f.record(), []byte("{"), 0o600))
		},
		"never ran, with a daemon that is not in the record": func(w *world, f folder) error {
			v, err := newControlProgram(w.options.Roots, f)
			if err != nil {
				return err
			}
			if err := errors.Join(f.make(), f.mount(mebibyte, ""), f.save(rules.Record{BootID: bootID, Spec: one})); err != nil {
				return err
			}
			_, err = process.Start(v.daemon(one))
			return err
		},
		"of another boot": func(_ *world, f folder) error {
			// A PID of now that must not be touched.
			self, err := process.Identify(os.Getpid())
			return errors.Join(err, f.make(), f.save(rules.Record{BootID: "another", Spec: one, Started: true, Serving: true, Daemon: &self}))
		},
		"in the middle of Stop": func(_ *world, f folder) error {
			return errors.Join(f.make(), f.mount(mebibyte, ""), f.save(rules.Record{BootID: bootID, Spec: one, Started: true, Removing: true}))
		},
		"of something newer": func(_ *world, f folder) error {
			return errors.Join(f.make(), os.WriteFile(f.record(), []byte(`{"apiVersion": "mps.partage.dev/v9"}`), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			f := w.folder(one.ID)
			must.Do(t, errors.Join(os.Mkdir(string(f), 0o700), leave(w, f)))
			// Not a session's.
			foreign := filepath.Join(w.dir, "Not_a_session")
			must.Do(t, os.Mkdir(foreign, 0o700))
			s := w.supervisor()
			eventually(t, "the remnants to be gone", func() bool { return len(s.List()) == 0 })
			w.nothingLeft(one.ID)
			expect.Do(t, expect.Err(os.Stat(foreign)))
		})
	}
}

// TestUnreadableRecord: a disk that cannot be read is no reason to end a session.
func TestUnreadableRecord(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	before := first.ensure(t, one)
	first.end(unix.SIGKILL)
	path := w.folder(one.ID).record()
	aside := filepath.Join(w.dir, "aside")
	must.Do(t, errors.Join(os.Rename(path, aside), os.Mkdir(path, 0o700)))
	s, err := New(t.Context(), w.options)
	expect.Says(t, err, path)
	must.Do(t, errors.Join(s.Close(t.Context()), os.Remove(path), os.Rename(aside, path)))
	after := reaches(t, w.supervisor(), one.ID, mps.Running, 0)
	expect.Same(t, before.Servers, after.Servers)
}

// TestEnsureAfterCrash does not wait for the remnants to be gone.
func TestEnsureAfterCrash(t *testing.T) {
	w := newWorld(t)
	f := w.folder(one.ID)
	must.Do(t, errors.Join(f.make(), f.mount(mebibyte, "")))
	s := w.supervisor()
	status, err := s.Ensure(t.Context(), one)
	if err != nil || status.Losses != 0 {
		t.Errorf("got %v, %v", status, err)
	}
}

// TestCrashInRestart: a loss is counted once, in whatever state the next supervisor
// finds the session.
func TestCrashInRestart(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	first.ensure(t, one)
	w.script(script{Slow: time.Second})
	r := must.Get(w.folder(one.ID).load())(t)
	kill(t, r.Daemon.PID)
	eventually(t, "the next daemon to be started", func() bool {
		next, err := w.folder(one.ID).load()
		return err == nil && next.Daemon != nil && next.Daemon.PID != r.Daemon.PID
	})
	first.end(unix.SIGKILL)
	s := w.supervisor()
	after := reaches(t, s, one.ID, mps.Running, 1)
	inEffect(t, s, after)
}

// TestKilledAtAnyTime: after a supervisor was killed, the next one can start and
// stop the session, and nothing is left.
func TestKilledAtAnyTime(t *testing.T) {
	w := newWorld(t)
	for _, stopping := range []bool{false, true} {
		for after := time.Millisecond; after < 100*time.Millisecond; after += 11 * time.Millisecond {
			first := w.other()
			if stopping {
				first.ensure(t, one)
			} else {
				eventually(t, "the supervisor", func() bool { _, err := first.List(t.Context()); return err == nil })
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				if stopping {
					_ = first.Stop(t.Context(), one.ID)
				} else {
					_, _ = first.Ensure(t.Context(), one)
				}
			}()
			time.Sleep(after)
			first.end(unix.SIGKILL)
			<-done
			second := w.other()
			if status := second.ensure(t, one); status.Phase != mps.Running {
				t.Errorf("stopping %t, after %s: got %v", stopping, after, status)
			}
			expect.Do(t, second.Stop(t.Context(), one.ID), "stopping", stopping, "after", after)
			w.nothingLeft(one.ID)
			second.end(unix.SIGKILL)
		}
	}
}

// The supervisor of one version adopts the sessions of another: the form of the record
// must stay.
func TestRecordFormat(t *testing.T) {
	const text = `{
  "apiVersion": "mps.partage.dev/v1",
  "bootID": "6f1c9c0e-0000-4000-8000-000000000001",
  "spec": {
    "id": "gpu-0",
    "devices": [
      "GPU-aaaaaaaa-0000-0000-0000-000000000001"
    ],
    "threadPercentage": 25,
    "memory": {
      "GPU-aaaaaaaa-0000-0000-0000-000000000001": 1073741824
    },
    "multiUser": true
  },
  "started": true,
  "removing": true,
  "serving": true,
  "daemon": {
    "pid": 4711,
    "start": 815
  },
  "servers": [
    {
      "pid": 4712,
      "start": 816
    }
  ],
  "sockets": {
    "control": {
      "device": 60,
      "inode": 5
    }
  },
  "serverUser": "0",
  "losses": 2,
  "lastLoss": "the server (PID 4700) ended",
  "lastLossTime": "2026-11-01T12:00:00Z"
}
`
	want := rules.Record{
		APIVersion: recordVersion, BootID: "6f1c9c0e-0000-4000-8000-000000000001",
		Spec:    mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25, Memory: map[string]int64{gpuA: 1 << 30}, MultiUser: true},
		Started: true, Removing: true, Serving: true,
		Daemon: &process.ID{PID: 4711, Start: 815}, Servers: []process.ID{{PID: 4712, Start: 816}}, ServerUser: "0",
		Sockets: map[string]process.Socket{"control": {Device: 60, Inode: 5}},
		History: mps.History{Losses: 2, LastLoss: "the server (PID 4700) ended", LastLossTime: time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)},
	}
	f := folder(filepath.Join(t.TempDir(), "gpu-0"))
	must.Do(t, os.Mkdir(string(f), 0o700))
	must.Do(t, f.save(want))
	if data, err := os.ReadFile(f.record()); err != nil || cmp.Diff(text, string(data)) != "" {
		t.Errorf("%v, -want +got:\n%s", err, cmp.Diff(text, string(data)))
	}
	if got, err := f.load(); err != nil || cmp.Diff(want, got) != "" {
		t.Errorf("%v, -want +got:\n%s", err, cmp.Diff(want, got))
	}
}
