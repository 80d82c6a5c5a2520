// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var one = mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25, Memory: map[string]int64{gpuA: 1 << 30}}

func started(t *testing.T, change ...func(*Options)) (*world, *Supervisor, mps.Status) {
	t.Helper()
	return startedWith(t, one.OnClientKilled, change...)
}

func daemonOf(t *testing.T, s *Supervisor, id string) int {
	t.Helper()
	r, err := s.folder(id).load()
	if err != nil || r.Daemon == nil {
		t.Fatalf("no daemon: %v", err)
	}
	return r.Daemon.PID
}

// clientOf is a client of a session's control daemon.
func clientOf(t *testing.T, s *Supervisor, id string) control.Client {
	t.Helper()
	r := must.Get(s.folder(id).load())(t)
	c := must.Get((&daemon{options: s.options, folder: s.folder(id)}).client(&r))(t)
	c.Check = func() error { return nil } // it asks without looking at the sockets
	return c
}

// hasLimits returns an error unless a server has the limits of the spec, or the next server if it is 0.
func hasLimits(t *testing.T, c control.Client, server int, spec mps.Spec) error {
	t.Helper()
	if server != 0 {
		servers, err := c.Inspect(t.Context(), []int{server}, spec)
		if err != nil || len(servers) != 1 || servers[0].Unlimited != "" {
			return fmt.Errorf("servers %+v: %w", servers, err)
		}
		return nil
	}
	ask := func(command string) string {
		cmd := c.Command(t.Context())
		cmd.Stdin = strings.NewReader(command + "\n")
		answer := must.Get(cmd.Output())(t)
		return strings.TrimSpace(string(answer))
	}
	if got, err := control.ParsePercentage(ask("get_default_active_thread_percentage")); err != nil || got != float64(spec.ThreadPercentage) {
		return fmt.Errorf("the next server gets %g percent, %w", got, err)
	}
	for i, device := range spec.Devices {
		answer := ask(fmt.Sprintf("get_default_device_pinned_mem_limit %d", i))
		if got, err := control.ParseMemory(answer); spec.Memory[device] > 0 && (err != nil || !got.Confirms(spec.Memory[device])) {
			return fmt.Errorf("the next server gets %s of %s: %w", answer, device, err)
		}
	}
	return nil
}

// inEffect checks what the servers of a session have for limits.
func inEffect(t *testing.T, s *Supervisor, status mps.Status) {
	t.Helper()
	c := clientOf(t, s, status.Spec.ID)
	for _, server := range status.Servers {
		expect.Do(t, hasLimits(t, c, server, status.Spec), "server", server)
	}
}

func TestDaemonEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]script{
		"and leaves its server":      {},
		"and hides what it has left": {Away: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.script(test)
			s := w.supervisor()
			before := must.Get(s.Ensure(t.Context(), one))(t)
			var pipe, pipeAfter unix.Stat_t
			must.Do(t, unix.Stat(before.PipeDir, &pipe))
			kept := filepath.Join(before.ShmDir, "kept")
			must.Do(t, os.WriteFile(kept, nil, 0o600))
			kill(t, daemonOf(t, s, one.ID))
			after := reaches(t, s, one.ID, mps.Running, 1)
			if !strings.Contains(after.LastLoss, "control daemon") || !strings.Contains(after.LastLoss, "SIGKILL") || time.Since(after.LastLossTime) > time.Minute {
				t.Errorf("got %q at %s", after.LastLoss, after.LastLossTime)
			}
			inEffect(t, s, after)
			if id := (process.ID{PID: before.Servers[0]}); after.Servers[0] == id.PID {
				t.Error("it is the same server")
			} else if identity, err := process.Identify(id.PID); err == nil && identity.Alive() {
				t.Errorf("the old server lives on")
			}
			// Containers have these two.
			if err := unix.Stat(before.PipeDir, &pipeAfter); err != nil || pipe.Ino != pipeAfter.Ino {
				t.Errorf("the pipe folder is another: %v", err)
			}
			expect.Do(t, expect.Err(os.Stat(kept)), "the shared memory is another")
			expect.Do(t, s.Stop(t.Context(), one.ID))
			w.nothingLeft(one.ID)
		})
	}
}

func TestServerEnds(t *testing.T) {
	_, s, before := started(t)
	daemon := daemonOf(t, s, one.ID)
	kill(t, before.Servers[0])
	after := reaches(t, s, one.ID, mps.Running, 1)
	if !strings.Contains(after.LastLoss, "server") || after.Servers[0] == before.Servers[0] || daemonOf(t, s, one.ID) != daemon {
		t.Errorf("got %v", after)
	}
	inEffect(t, s, after)
}

// TestServerForAnotherUser: without multi-user MPS replaces a server that has no
// clients any more. That is no loss.
func TestServerForAnotherUser(t *testing.T) {
	w, s, before := started(t)
	w.client(1000, before)
	var after mps.Status
	eventually(t, "a server for the client's user", func() bool {
		after = statusOf(t, s, one.ID)
		return after.Phase == mps.Running && len(after.Servers) == 1 && after.Servers[0] != before.Servers[0]
	})
	expect.Equal(t, after.Losses, 0, after)
	inEffect(t, s, after)
	// The next server is not for a waiting client.
	kill(t, after.Servers[0])
	reaches(t, s, one.ID, mps.Running, 1)

	// A server that crashes while another user's client waits.
	w.client(2000, after)
	eventually(t, "a client", func() bool {
		// Until it runs, its servers may be those of before.
		now := statusOf(t, s, one.ID)
		return now.Phase == mps.Running && len(now.Clients) == 1
	})
	waiting := w.client(3000, after)
	eventually(t, "another client to wait", func() bool { return w.logged(one.ID, fmt.Sprintf("NEW CLIENT %d ", waiting.Process.Pid)) })
	crashed := statusOf(t, s, one.ID).Servers[0]
	// A client can write to the log, and hides nothing by that.
	w.forgeLog(one.ID, fmt.Sprintf("Server %d exited with status 0", crashed))
	kill(t, crashed)
	reaches(t, s, one.ID, mps.Running, 2)
}

// forgeLog writes a line into the logs of a session's daemon.
func (w *world) forgeLog(id, line string) {
	w.Helper()
	for _, name := range logNames {
		file, err := os.OpenFile(w.folder(id).logs().path(name), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
		if err == nil {
			_, err = fmt.Fprintln(file, line)
			err = errors.Join(err, file.Close())
		}
		must.Do(w, err)
	}
}

// TestForgedEnd: nothing that a log says ends a session that is well, or is a loss.
func TestForgedEnd(t *testing.T) {
	w, s, before := started(t)
	for _, line := range []string{
		"Server %d exited with status 1", "Server %d ended: signal: killed", "Starting new server %d for user 1000", "NEW SERVER %d: FAULT",
	} {
		w.forgeLog(one.ID, "[Control 1] "+fmt.Sprintf(line, before.Servers[0]))
	}
	w.client(1000, before)
	var after mps.Status
	eventually(t, "a server for the client's user", func() bool {
		after = statusOf(t, s, one.ID)
		return after.Phase == mps.Running && len(after.Servers) == 1 && after.Servers[0] != before.Servers[0]
	})
	expect.Equal(t, after.Losses, 0, after)
}

func TestFault(t *testing.T) {
	w, s, _ := started(t)
	w.script(script{State: "FAULT", Clients: []int{os.Getpid()}})
	faulted := reaches(t, s, one.ID, mps.Faulted, 1)
	if !strings.Contains(faulted.Message, "have ended") || !strings.Contains(faulted.LastLoss, "fault") {
		t.Errorf("got %v", faulted)
	}
	expect.Is(t, expect.Err(s.Ensure(t.Context(), one)), mps.ErrFaulted)
	// It is one loss, however often it is looked at, and however it ends.
	w.script(script{State: "INITIALIZING"})
	reaches(t, s, one.ID, mps.Starting, 1)
	w.script(script{Clients: []int{1, 2}})
	recovered := reaches(t, s, one.ID, mps.Running, 1)
	expect.Equal(t, recovered.Message, "")
	eventually(t, "clients to be known", func() bool { return len(statusOf(t, s, one.ID).Clients) == 2 })
	w.script(script{State: "FAULT"})
	reaches(t, s, one.ID, mps.Faulted, 2)
	kill(t, daemonOf(t, s, one.ID))
	w.script(script{})
	reaches(t, s, one.ID, mps.Running, 2)
}

// TestFaultThatNobodySaw: clients that end at once let the server recover between two
// looks.
func TestFaultThatNobodySaw(t *testing.T) {
	w, s, _ := started(t)
	w.script(script{State: "INITIALIZING"})
	reaches(t, s, one.ID, mps.Starting, 1)
	w.script(script{})
	after := reaches(t, s, one.ID, mps.Running, 1)
	expect.Contains(t, after.LastLoss, "fault")
	// A server is watched once, however often it comes back.
	watching := 0
	infos, err := filepath.Glob("/proc/self/fdinfo/*")
	for _, path := range infos {
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), "Pid:\t"+strconv.Itoa(after.Servers[0])+"\n") {
			watching++
		}
	}
	if watching != 1 || err != nil {
		t.Errorf("%d descriptors of the server, %v", watching, err)
	}
}

// TestServerHasEnded: neither a daemon that has not noticed yet nor a PID that is
// used again make a server that has ended look alive.
func TestServerHasEnded(t *testing.T) {
	w, s, before := started(t)
	w.script(script{Claim: before.Servers[0]})
	kill(t, before.Servers[0])
	eventually(t, "it to be noticed", func() bool { return statusOf(t, s, one.ID).Phase != mps.Running })
	w.script(script{})
	reaches(t, s, one.ID, mps.Running, 1)

	sess := locked(t, s, one.ID)
	sess.record.Servers[0].Start--
	sess.lock.Release(1)
	reaches(t, s, one.ID, mps.Running, 2)
}

// TestDefaultsOfTheNextServer: clients may come before the limits of a server itself
// could be set.
func TestDefaultsOfTheNextServer(t *testing.T) {
	_, s, before := started(t)
	c := clientOf(t, s, one.ID)
	other := one
	other.ThreadPercentage = 90
	must.Do(t, c.SetLimits(t.Context(), other, 0))
	kill(t, before.Servers[0])
	reaches(t, s, one.ID, mps.Running, 1)
	expect.Do(t, hasLimits(t, c, 0, one))
}

func TestSilentDaemon(t *testing.T) {
	w, s, status := started(t, hasty)
	daemon := daemonOf(t, s, one.ID)
	// With a client that would notice, it is only reported.
	w.inPod(w.client(0, status).Process.Pid)
	eventually(t, "the client to be known", func() bool { return len(statusOf(t, s, one.ID).Clients) == 1 })
	w.script(script{Hang: true})
	eventually(t, "silence to be noticed", func() bool { return statusOf(t, s, one.ID).Phase == mps.Failed })
	sess := s.sessions[one.ID]
	eventually(t, "the daemon to be silent for long", func() bool {
		if sess.lock.Acquire(t.Context(), 1) != nil {
			return false
		}
		defer sess.lock.Release(1)
		return !sess.pace.Silent.IsZero() && time.Since(sess.pace.Silent) > 2*15*w.options.CheckInterval
	})
	expect.Equal(t, daemonOf(t, s, one.ID), daemon, "the daemon was replaced")
	w.script(script{})
	eventually(t, "the daemon to answer", func() bool { return statusOf(t, s, one.ID).Phase == mps.Running })
}

// TestSilentDaemonIsReplaced: a session could never start a server again with it.
func TestSilentDaemonIsReplaced(t *testing.T) {
	_, s, _ := started(t, hasty)
	daemon := daemonOf(t, s, one.ID)
	must.Do(t, unix.Kill(daemon, unix.SIGSTOP))
	after := reaches(t, s, one.ID, mps.Running, 1)
	if !strings.Contains(after.LastLoss, "does not answer") || daemonOf(t, s, one.ID) == daemon {
		t.Errorf("got %v", after)
	}
}

func TestUnmounted(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]func(folder) string{"pipe": folder.pipe, "memory": func(f folder) string { return string(f.memory()) }} {
		t.Run(name, func(t *testing.T) {
			w, s, _ := started(t)
			path := path(w.folder(one.ID))
			must.Do(t, unix.Unmount(path, unix.MNT_DETACH))
			after := reaches(t, s, one.ID, mps.Running, 1)
			expect.Contains(t, after.LastLoss, "unmounted "+path)
			expect.Len(t, must.Get(s.folder(one.ID).lost())(t), 0, "not mounted")
		})
	}
}
