// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// TestStopOfSoundDaemon: a daemon that quits removes its sockets. That is no reason to
// terminate it, nor to tell the admin of it.
func TestStopOfSoundDaemon(t *testing.T) {
	w := newWorld(t)
	w.script(script{SlowEnd: true})
	// However slow the machine is.
	w.options.CommandLimit, w.options.EndLimit = time.Minute, time.Minute
	s := w.supervisor()
	if _, err := s.Ensure(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	if err := s.Stop(klog.NewContext(t.Context(), logger), one.ID); err != nil {
		t.Fatal(err)
	}
	buffer, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatalf("got a %T", logger.GetSink())
	}
	if log := buffer.GetBuffer().String(); strings.Contains(log, "does not quit") || !strings.Contains(log, "stopped") {
		t.Errorf("got %s", log)
	}
}
