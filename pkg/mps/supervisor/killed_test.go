// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/must"
)

// podClient starts a client that is in a pod, and waits until its end would be noticed.
func (w *world) podClient(s *Supervisor, status mps.Status) *exec.Cmd {
	w.Helper()
	cmd := w.client(0, status)
	w.inPod(cmd.Process.Pid)
	w.untilWatched(s, status.Spec.ID, cmd.Process.Pid)
	return cmd
}

func (w *world) untilWatched(s *Supervisor, id string, pid int) {
	w.Helper()
	sess := s.sessions[id]
	eventually(w, "the client to be watched", func() bool {
		must.Do(w, sess.lock.Acquire(w.Context(), 1))
		defer sess.lock.Release(1)
		return sess.watch.clients[pid] != nil
	})
}

func withReaction(reaction mps.OnClientKilled) mps.Spec {
	spec := one
	spec.OnClientKilled = reaction
	return spec
}

// startedWith returns a session with a reaction to killed clients.
func startedWith(t *testing.T, reaction mps.OnClientKilled, change ...func(*Options)) (*world, *Supervisor, mps.Status) {
	t.Helper()
	w, s := supervised(t, change...)
	status := must.Get(s.Ensure(t.Context(), withReaction(reaction)))(t)
	return w, s, status
}

// untilReplaced waits for another server to run.
func untilReplaced(t *testing.T, s *Supervisor, before mps.Status) mps.Status {
	t.Helper()
	var now mps.Status
	eventually(t, "another server", func() bool {
		now = statusOf(t, s, before.Spec.ID)
		return now.Phase == mps.Running && len(now.Servers) == 1 && now.Servers[0] != before.Servers[0]
	})
	return now
}

// TestKilledClientReported: those that share a server with a client that was killed are told
// once. The server is replaced when nobody loses anything by that.
func TestKilledClientReported(t *testing.T) {
	w, s, before := startedWith(t, "")
	other, first, second := w.podClient(s, before), w.podClient(s, before), w.podClient(s, before)
	kill(t, first.Process.Pid)
	eventually(t, "the kill to be reported", func() bool { return statusOf(t, s, one.ID).Kills == 1 })
	now := statusOf(t, s, one.ID)
	if !strings.Contains(now.LastKill, "SIGKILL") || now.Losses > 0 || !slices.Equal(now.Servers, before.Servers) {
		t.Errorf("got %+v", now)
	}
	kill(t, second.Process.Pid)
	eventually(t, "the client to be gone", func() bool { return !slices.Contains(statusOf(t, s, one.ID).Clients, second.Process.Pid) })
	if now := statusOf(t, s, one.ID); now.Kills != 1 {
		t.Errorf("got %+v", now)
	}
	must.Do(t, other.Process.Signal(unix.SIGTERM))
	after := untilReplaced(t, s, before)
	if after.Losses > 0 || after.Kills != 1 {
		t.Errorf("got %+v", after)
	}
	w.container(after).connects()
}

// TestKilledClientRestarts: by policy the server is replaced at once.
func TestKilledClientRestarts(t *testing.T) {
	w, s, before := startedWith(t, mps.RestartServer)
	w.podClient(s, before)
	kill(t, w.podClient(s, before).Process.Pid)
	after := untilReplaced(t, s, before)
	if after.Losses != 1 || after.Kills > 0 || !strings.Contains(after.LastLoss, "was killed: signal 9 (SIGKILL)") {
		t.Errorf("got %+v", after)
	}
	w.container(after).connects()
}

// TestOnlyClientKilled: a server that nobody else uses is replaced without a word.
func TestOnlyClientKilled(t *testing.T) {
	w, s, before := startedWith(t, "")
	kill(t, w.podClient(s, before).Process.Pid)
	after := untilReplaced(t, s, before)
	if after.Losses > 0 || after.Kills > 0 {
		t.Errorf("got %+v", after)
	}
	w.container(after).connects()
}

// TestClientEndsProperly: such an end, and that of a process which is in no pod, change
// nothing; nor does what happens to clients when their server is lost.
func TestClientEndsProperly(t *testing.T) {
	w, s, before := startedWith(t, mps.RestartServer)
	proper, stranger, stays := w.podClient(s, before), w.client(0, before), w.podClient(s, before)
	eventually(t, "the stranger", func() bool { return slices.Contains(statusOf(t, s, one.ID).Clients, stranger.Process.Pid) })
	must.Do(t, proper.Process.Signal(unix.SIGTERM))
	kill(t, stranger.Process.Pid)
	eventually(t, "both to be gone", func() bool { return slices.Equal(statusOf(t, s, one.ID).Clients, []int{stays.Process.Pid}) })
	now := statusOf(t, s, one.ID)
	if now.Losses > 0 || now.Kills > 0 || !slices.Equal(now.Servers, before.Servers) {
		t.Errorf("got %+v", now)
	}
	// In the middle of a look at the session, the kill alone may be seen, and that nobody loses anything.
	sess := locked(t, s, one.ID)
	kill(t, before.Servers[0])
	eventually(t, "the server to end", func() bool { return !slices.ContainsFunc(before.Servers, process.Alive) })
	kill(t, stays.Process.Pid)
	sess.lock.Release(1)
	reaches(t, s, one.ID, mps.Running, 1)
	w.container(statusOf(t, s, one.ID)).connects()
	if now := statusOf(t, s, one.ID); now.Losses != 1 || now.Kills > 0 {
		t.Errorf("got %+v", now)
	}
}

// TestReactionChanges: a running session gets the reaction of the last Ensure.
func TestReactionChanges(t *testing.T) {
	_, s, before := startedWith(t, "")
	after, err := s.Ensure(t.Context(), withReaction(mps.RestartServer))
	if err != nil || after.Losses > 0 || !slices.Equal(after.Servers, before.Servers) {
		t.Fatalf("got %+v, %v", after, err)
	}
	if r, err := s.folder(one.ID).load(); err != nil || r.Spec.OnClientKilled != mps.RestartServer {
		t.Errorf("got %+v, %v", r.Spec, err)
	}
}
