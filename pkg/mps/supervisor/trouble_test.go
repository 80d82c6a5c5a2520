// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/podend"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// These are about actions that fail or change nothing, and about processes that a keeper does not end.

// TestRemovalFails: what cannot be removed is tried again after a pause.
func TestRemovalFails(t *testing.T) {
	w, s, _ := started(t)
	f := string(w.folder(one.ID))
	must.Do(t, unix.Mount(f, f, "", unix.MS_BIND|unix.MS_REC, ""))
	unmount := func() { _ = unix.Unmount(f, unix.MNT_DETACH) }
	t.Cleanup(unmount)
	expect.Fails(t, s.Stop(t.Context(), one.ID), "a folder that is a mount point was removed")
	sess := locked(t, s, one.ID)
	if again, err := sess.run(t.Context(), rules.Removed, nil); err == nil || again < w.options.CheckInterval {
		t.Errorf("it is tried again after %s: %v", again, err)
	}
	sess.lock.Release(1)
	unmount()
	eventually(t, "it to be removed", func() bool { return len(s.List()) == 0 })
}

// starting returns what the first Ensure of a session comes to, whose server takes its time.
func (w *world) starting(s *Supervisor) <-chan error {
	w.Helper()
	w.script(script{State: "INITIALIZING"})
	done := make(chan error, 1)
	go func() {
		_, err := s.Ensure(context.Background(), one)
		done <- err
	}()
	eventually(w, "a server that starts", func() bool {
		all := s.List()
		return len(all) > 0 && strings.Contains(all[0].Message, "INITIALIZING")
	})
	return done
}

// TestFirstStartCannotBeRecorded: nothing is left of it.
func TestFirstStartCannotBeRecorded(t *testing.T) {
	w, s := supervised(t)
	done := w.starting(s)
	must.Do(t, os.MkdirAll(filepath.Join(host.TemporaryName(w.folder(one.ID).record()), "in the way"), 0o700))
	w.script(script{})
	expect.Fails(t, <-done, "the start succeeds")
	w.nothingLeft(one.ID)
}

// TestKeeperIsKilledEarly: a server that was listed and does not notice that its daemon has ended, as one that is busy with the
// GPU, does not outlive a start that fails.
func TestKeeperIsKilledEarly(t *testing.T) {
	w, s := supervised(t)
	done := w.starting(s)
	eventually(t, "the server to be recorded", func() bool {
		r, err := s.folder(one.ID).load()
		return err == nil && len(r.Servers) == 1
	})
	must.Do(t, unix.Kill(must.Get(s.folder(one.ID).load())(t).Servers[0].PID, unix.SIGSTOP))
	w.signalKeeper(unix.SIGKILL)
	expect.Fails(t, <-done, "the start succeeds")
	expect.Len(t, w.driverProcesses(), 0, "left")
}

func (w *world) signalKeeper(signal unix.Signal) {
	w.Helper()
	id, found, err := keeper.Of(w.folder(one.ID).keeper())
	if err != nil || !found {
		w.Fatalf("no keeper: %v", err)
	}
	must.Do(w, id.Signal(signal))
}

// TestKeeperIsStopped: a session is removed all the same.
func TestKeeperIsStopped(t *testing.T) {
	w, s, _ := started(t)
	w.signalKeeper(unix.SIGSTOP)
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

// TestLockIsRemoved: what runs is known without the keeper's lock, and a daemon that does not quit is ended.
func TestLockIsRemoved(t *testing.T) {
	w, s, _ := started(t, hasty)
	must.Do(t, os.Remove(w.folder(one.ID).keeper()))
	must.Do(t, unix.Kill(daemonOf(t, s, one.ID), unix.SIGSTOP))
	expect.Do(t, s.Stop(t.Context(), one.ID))
	expect.Len(t, w.driverProcesses(), 0, "left")
}

// TestLimitsThatDoNotLast: a server whose limits are other ones whenever somebody looks again keeps nobody waiting.
func TestLimitsThatDoNotLast(t *testing.T) {
	w, s, _ := started(t)
	w.script(script{Flap: true})
	expect.Do(t, expect.Err(s.Ensure(t.Context(), one)))
	w.script(script{})
}

// TestOtherLimitsMendSession: a session whose limits cannot be had any more gets those that somebody wants.
func TestOtherLimitsMendSession(t *testing.T) {
	w, s, _ := started(t)
	w.script(script{IgnoreDefault: true, IgnoreServer: true})
	kill(t, daemonOf(t, s, one.ID))
	eventually(t, "it to fail", func() bool { return statusOf(t, s, one.ID).Phase == mps.Failed })
	other := mps.Spec{ID: one.ID, Devices: one.Devices, Memory: one.Memory}
	if _, err := s.Ensure(t.Context(), other); err == nil {
		t.Error("limits of memory that cannot be had either")
	}
	expect.Equal(t, statusOf(t, s, one.ID).Spec.ThreadPercentage, one.ThreadPercentage, "percent that it wants after that")
	w.script(script{})
	expect.Do(t, expect.Err(s.Ensure(t.Context(), other)))
}

// TestClientsThatCannotBeTerminated keep nobody waiting for the session.
func TestClientsThatCannotBeTerminated(t *testing.T) {
	w, s, before := startedWith(t, "", patient)
	client := w.client(0, before)
	w.inPodWith(client.Process.Pid, endingPod)
	w.untilWatched(s, one.ID, client.Process.Pid)
	w.script(script{NoTermination: true})
	s.pods.PodEnds(t.Context(), podend.End{UID: endingPod, Grace: time.Hour, At: time.Now().Add(killMargin)})
	eventually(t, "an attempt", func() bool { return w.tried(s, client.Process.Pid) })
	other := one
	other.ThreadPercentage = 50
	expect.Do(t, expect.Err(s.Ensure(t.Context(), other)))
	if terminatedClient(t, s, one.ID, client.Process.Pid) {
		t.Error("it is taken for terminated")
	}
	s.pods.PodEnded(endingPod)
}

// tried reports whether it was tried to terminate a client.
func (w *world) tried(s *Supervisor, pid int) bool {
	w.Helper()
	sess := locked(w, s, one.ID)
	defer sess.lock.Release(1)
	c := sess.watch.clients[pid]
	return c != nil && !c.tried.IsZero()
}

// TestRecordIsWrittenLater: what could not be written down is, as soon as the disk takes it: another supervisor must know it.
func TestRecordIsWrittenLater(t *testing.T) {
	w, s, before := startedWith(t, "")
	w.podClient(s, before)
	victim := w.podClient(s, before)
	folder := w.folder(one.ID)
	inTheWay := host.TemporaryName(folder.record())
	must.Do(t, os.MkdirAll(filepath.Join(inTheWay, "folder"), 0o700))
	kill(t, victim.Process.Pid)
	eventually(t, "the kill to be reported", func() bool { return statusOf(t, s, one.ID).Kills == 1 })
	must.Do(t, os.RemoveAll(inTheWay))
	eventually(t, "the kill to be written down", func() bool {
		r, err := folder.load()
		return err == nil && r.Kills == 1 && r.ClientKilled != ""
	})
}
