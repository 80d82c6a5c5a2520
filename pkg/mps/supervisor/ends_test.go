// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/podend"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

const endingPod types.UID = "8b3f0e6e-7a59-4c8a-9d3c-2f1f4a1f0b11"

// ending is the end of endingPod.
func ending(at time.Time) podend.End {
	return podend.End{UID: endingPod, Grace: 30 * time.Second, At: at}
}

// terminatedClient reports whether a client may be killed.
func terminatedClient(t *testing.T, s *Supervisor, id string, pid int) bool {
	t.Helper()
	sess := locked(t, s, id)
	defer sess.lock.Release(1)
	c := sess.watch.clients[pid]
	return c != nil && c.terminated
}

// patient gives a daemon time to answer, however slow the machine is.
func patient(o *Options) { o.CommandLimit = time.Minute }

// TestPodEnds: shortly before a pod is killed, its clients are terminated, and no others. Then
// the kill harms nobody.
func TestPodEnds(t *testing.T) {
	w, s, before := startedWith(t, mps.RestartServer, patient)
	ends, stays := w.client(0, before), w.podClient(s, before)
	w.inPodWith(ends.Process.Pid, endingPod)
	w.untilWatched(s, one.ID, ends.Process.Pid)
	e := s.pods
	e.PodEnds(t.Context(), ending(time.Now().Add(time.Hour)))
	if terminatedClient(t, s, one.ID, ends.Process.Pid) {
		t.Error("it has an hour left")
	}
	// Somebody shortens the grace period.
	e.PodEnds(t.Context(), ending(time.Now().Add(time.Minute)))
	e.PodEnds(t.Context(), ending(time.Now().Add(killMargin)))
	eventually(t, "the client to be terminated", func() bool { return terminatedClient(t, s, one.ID, ends.Process.Pid) })
	if terminatedClient(t, s, one.ID, stays.Process.Pid) {
		t.Error("another pod's client was terminated")
	}
	kill(t, ends.Process.Pid)
	eventually(t, "it to be gone", func() bool { return slices.Equal(statusOf(t, s, one.ID).Clients, []int{stays.Process.Pid}) })
	e.PodEnded(endingPod)
	if now := statusOf(t, s, one.ID); now.Losses > 0 || now.Kills > 0 || !slices.Equal(now.Servers, before.Servers) {
		t.Errorf("got %+v", now)
	}
}

// TestPodEndsWithSilentDaemon: a daemon that does not answer keeps no other session from
// terminating its clients, and the wait for it is bounded.
func TestPodEndsWithSilentDaemon(t *testing.T) {
	w, s, silent := started(t, hasty)
	sound := must.Get(s.Ensure(t.Context(), mps.Spec{ID: "gpu-1", Devices: []string{gpuB}}))(t)
	a, b := w.client(0, silent), w.client(0, sound)
	for id, pid := range map[string]int{one.ID: a.Process.Pid, "gpu-1": b.Process.Pid} {
		w.inPodWith(pid, endingPod)
		w.untilWatched(s, id, pid)
	}
	must.Do(t, unix.Kill(daemonOf(t, s, one.ID), unix.SIGSTOP))
	s.pods.PodEnds(t.Context(), ending(time.Now().Add(killMargin)))
	eventually(t, "the client of the other session to be terminated", func() bool {
		return terminatedClient(t, s, "gpu-1", b.Process.Pid)
	})
	if terminatedClient(t, s, one.ID, a.Process.Pid) {
		t.Error("a daemon that does not answer has terminated a client")
	}
	must.Do(t, unix.Kill(daemonOf(t, s, one.ID), unix.SIGCONT))
}

// TestTerminationHangs: a client whose termination does not return keeps no other from being terminated.
func TestTerminationHangs(t *testing.T) {
	w, s, before := started(t, hasty)
	for range 2 {
		c := w.client(0, before)
		w.inPodWith(c.Process.Pid, endingPod)
		w.untilWatched(s, one.ID, c.Process.Pid)
	}
	clients := statusOf(t, s, one.ID).Clients // they are terminated in this order
	w.script(script{HangTermination: clients[0]})
	s.pods.PodEnds(t.Context(), ending(time.Now().Add(killMargin)))
	eventually(t, "the other client to be terminated", func() bool { return terminatedClient(t, s, one.ID, clients[1]) })
	if terminatedClient(t, s, one.ID, clients[0]) {
		t.Error("what does not return has terminated a client")
	}
	w.script(script{})
	eventually(t, "the client to be terminated", func() bool { return terminatedClient(t, s, one.ID, clients[0]) })
}

// TestInTime: sessions are observed when the clients of a pod are to be terminated, whenever they were observed before.
func TestInTime(t *testing.T) {
	for _, grace := range []time.Duration{time.Second, 2 * time.Second, 30 * time.Second} {
		e := &endingPods{wake: func() {}, options: Options{}.withDefaults(), ends: map[types.UID]podend.End{}}
		now := time.Now()
		end := podend.End{UID: endingPod, Grace: grace, At: now.Add(grace)}
		e.PodEnds(t.Context(), end)
		for _, before := range []time.Duration{time.Second, 10 * time.Millisecond} {
			at := doomAt(end).Add(-before)
			if next := at.Add(e.next(at, 2*time.Second)); next.After(doomAt(end)) {
				t.Errorf("grace %s, observed %s before the time: then %s after it", grace, before, next.Sub(doomAt(end)))
			}
		}
		expect.Equal(t, e.next(end.At, 2*time.Second), e.options.CheckInterval/2, "at the time it looks again after")
		if again := e.next(end.At.Add(time.Minute), 2*time.Second); again != 2*time.Second || len(e.ends) > 0 {
			t.Errorf("long after the time: again after %s, known are %v", again, e.ends)
		}
	}
}

func TestMargin(t *testing.T) {
	for grace, want := range map[time.Duration]time.Duration{
		0: 0, time.Second: time.Second / 2, 2 * time.Second: time.Second, 30 * time.Second: killMargin, time.Hour: killMargin,
	} {
		now := time.Now()
		expect.Equal(t, now.Sub(doomAt(podend.End{At: now, Grace: grace})), want, grace)
	}
}

// TestPodEndsWithOneThatCannot: a process that the server does not know as a client, as one
// to which a client has passed its connection on, keeps no other from being terminated.
func TestPodEndsWithOneThatCannot(t *testing.T) {
	w, s, before := startedWith(t, "", patient)
	ends := w.client(0, before)
	stranger := exec.Command("sleep", "infinity")
	w.runs(stranger)
	for _, cmd := range []*exec.Cmd{ends, stranger} {
		w.inPodWith(cmd.Process.Pid, endingPod)
	}
	w.untilWatched(s, one.ID, ends.Process.Pid)
	w.script(script{Clients: []int{stranger.Process.Pid, ends.Process.Pid}})
	s.pods.PodEnds(t.Context(), ending(time.Now().Add(killMargin)))
	eventually(t, "the client to be terminated", func() bool { return terminatedClient(t, s, one.ID, ends.Process.Pid) })
	if terminatedClient(t, s, one.ID, stranger.Process.Pid) {
		t.Error("a process that is no client is taken for terminated")
	}
}
