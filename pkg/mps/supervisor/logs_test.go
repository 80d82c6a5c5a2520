// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

func TestBoundLogs(t *testing.T) {
	_, s, status := started(t)
	path := s.folder(status.Spec.ID).logs().path("control.log")
	must.Do(t, os.WriteFile(path, []byte(strings.Repeat("line\n", maxLog/5+1)+"the last\n"), 0o600))
	eventually(t, "the log to be short", func() bool {
		info, err := os.Stat(path)
		return err == nil && info.Size() < maxLog/2
	})
	eventually(t, "its end to be kept", func() bool {
		data, err := os.ReadFile(path + ".old")
		// The daemon writes there, too, whenever it is asked something.
		return err == nil && len(data) == keptLog && strings.Contains(string(data), "line\nthe last\n")
	})
}

// emptied are the times at which the logs of a session were last emptied, by name. A log that the last daemon left is larger.
func (l logs) emptied() map[string]time.Time {
	times := map[string]time.Time{}
	for _, name := range logNames {
		if info, err := os.Stat(l.path(name) + oldLog); err == nil && info.Size() == keptLog {
			times[name] = info.ModTime()
		}
	}
	return times
}

// TestFloodedLogs: whatever the session is about, a daemon that writes without end
// cannot take more than the logs may have, and the session stays usable.
func TestFloodedLogs(t *testing.T) {
	w := newWorld(t, hasty)
	w.script(script{Flood: true})
	w.options.StartLimit = 20 * time.Second // for a busy machine; it has failed when it could not be started three times
	s := w.supervisor()
	must.Get(s.Ensure(t.Context(), one))(t)
	logs := w.folder(one.ID).logs()
	if got := size(t, string(logs)); got != logSize {
		t.Errorf("the logs are on a file system of %d MiB", got/mebibyte)
	}
	phases := map[mps.Phase]script{
		mps.Running:  {},
		mps.Starting: {State: "INITIALIZING"},
		mps.Faulted:  {State: "FAULT"},
		mps.Failed:   {Hang: true, Clients: []int{os.Getpid()}},
	}
	for phase, script := range phases {
		script.Flood = true
		if script.Hang {
			// A daemon with clients is not replaced because it does not answer.
			asked := script
			asked.Hang = false
			w.script(asked)
			eventually(t, "the client to be known", func() bool { return len(statusOf(t, s, one.ID).Clients) == 1 })
		}
		w.script(script)
		eventually(t, "the session to be "+string(phase), func() bool { return statusOf(t, s, one.ID).Phase == phase })
		for range 2 { // what was done once is done again
			before := logs.emptied()
			eventually(t, string(phase)+": all logs to be emptied", func() bool {
				now := logs.emptied()
				return !slices.ContainsFunc(logNames, func(name string) bool { return !now[name].After(before[name]) })
			})
		}
		expect.Equal(t, statusOf(t, s, one.ID).Phase, phase, "in the end")
	}
	expect.Equal(t, len(phases), 4, "phases")
	w.script(script{})
	eventually(t, "the session to run", func() bool { return statusOf(t, s, one.ID).Phase == mps.Running })
	inEffect(t, s, statusOf(t, s, one.ID))
}

// TestFullLogs: neither bytes nor files that are used up keep a daemon from its start.
func TestFullLogs(t *testing.T) {
	w, s, before := started(t)
	logs := w.folder(one.ID).logs()
	must.Do(t, os.Mkdir(logs.path("folder"), 0o700))
	var failure error
	for i := 0; failure == nil && i < 2*logSize/mebibyte; i++ {
		// None is too large by itself.
		failure = os.WriteFile(logs.path("junk"+strconv.Itoa(i)), make([]byte, mebibyte), 0o600)
	}
	if !errors.Is(failure, unix.ENOSPC) {
		t.Fatalf("got %v", failure)
	}
	failure = nil
	for i := 0; failure == nil && int64(i) <= host.TmpfsFiles(logSize); i++ {
		failure = os.Mkdir(logs.path(filepath.Join("folder", strconv.Itoa(i))), 0o700)
	}
	if !errors.Is(failure, unix.ENOSPC) {
		t.Fatalf("got %v", failure)
	}
	kill(t, daemonOf(t, s, before.Spec.ID))
	after := reaches(t, s, one.ID, mps.Running, 1)
	inEffect(t, s, after)
	if !w.logged(one.ID, "Starting control daemon") {
		t.Error("the daemon has logged nothing")
	}
}

// A session whose logs an earlier version put on the host's file system goes on.
func TestLogsWithoutMount(t *testing.T) {
	w, s, before := started(t)
	logs := w.folder(one.ID).logs()
	must.Do(t, unix.Unmount(string(logs), unix.MNT_DETACH))
	must.Do(t, os.WriteFile(logs.path("control.log"), make([]byte, 2*maxLog), 0o600))
	eventually(t, "the log to be short", func() bool {
		info, err := os.Stat(logs.path("control.log"))
		return err == nil && info.Size() == 0
	})
	if got := statusOf(t, s, one.ID); got.Losses != 0 || got.Servers[0] != before.Servers[0] {
		t.Errorf("got %v", got)
	}
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Running, 1)
	if got := size(t, string(logs)); got != logSize {
		t.Errorf("the logs of the next daemon are on a file system of %d MiB", got/mebibyte)
	}
}
