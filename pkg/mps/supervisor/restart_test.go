// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
)

func TestRestartFails(t *testing.T) {
	w, s, _ := started(t)
	w.script(script{Exit: "out of luck"})
	kill(t, daemonOf(t, s, one.ID))
	failed := reaches(t, s, one.ID, mps.Failed, 1)
	expect.Contains(t, failed.Message, "out of luck")
	expect.Says(t, expect.Err(s.Ensure(t.Context(), one)), "out of luck")
	// Ensure does not wait for the delay to be over.
	w.script(script{})
	status, err := s.Ensure(t.Context(), one)
	if err != nil || status.Losses != 1 || status.Phase != mps.Running {
		t.Errorf("got %v, %v", status, err)
	}
	// And it comes back by itself.
	w.script(script{NoServer: true})
	kill(t, status.Servers[0])
	reaches(t, s, one.ID, mps.Failed, 2)
	w.script(script{})
	reaches(t, s, one.ID, mps.Running, 2)
}

// TestRestartFailsWithOtherLimits: a session that cannot run keeps its limits.
func TestRestartFailsWithOtherLimits(t *testing.T) {
	w, s, _ := started(t)
	w.script(script{Exit: "out of luck"})
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Failed, 1)
	raised := clone(one)
	raised.ThreadPercentage = 75
	if _, err := s.Ensure(t.Context(), raised); err == nil {
		t.Error("no error")
	}
	expect.Equal(t, statusOf(t, s, one.ID).Spec.ThreadPercentage, one.ThreadPercentage, "percent")
	if r, err := w.folder(one.ID).load(); err != nil || r.Spec.ThreadPercentage != one.ThreadPercentage {
		t.Errorf("got %v, %v", r.Spec, err)
	}
	w.script(script{})
	after := reaches(t, s, one.ID, mps.Running, 1)
	expect.Equal(t, after.Spec.ThreadPercentage, one.ThreadPercentage, "percent")
	inEffect(t, s, after)
}

// TestStopWhileItCannotStart: Stop does not wait for a start that takes for ever.
func TestStopWhileItCannotStart(t *testing.T) {
	w, s, _ := started(t, func(o *Options) { o.StartLimit = time.Hour })
	w.script(script{Slow: time.Hour})
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Starting, 1)
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

// TestServerKeepsEnding: it is not started again and again without a pause.
func TestServerKeepsEnding(t *testing.T) {
	w, s, before := started(t, func(o *Options) { o.FirstPause, o.LongestPause = time.Minute, time.Hour })
	// One follows at once; when that ends as well there is none for a while.
	kill(t, before.Servers[0])
	kill(t, reaches(t, s, one.ID, mps.Running, 1).Servers[0])
	reaches(t, s, one.ID, mps.Starting, 2)
	// Who asks does not wait.
	expect.Do(t, expect.Err(s.Ensure(t.Context(), one)))
	reaches(t, s, one.ID, mps.Running, 2)
	log, err := os.ReadFile(w.folder(one.ID).logs().path("control.log"))
	if starts := strings.Count(string(log), "Cmd:start_server"); err != nil || starts != 3 {
		t.Errorf("%d servers were started, %v, want 3", starts, err)
	}
}
