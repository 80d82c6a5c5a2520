// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestStopOfSoundDaemon: a daemon that quits removes its sockets. That is no reason to
// terminate it, nor to tell the admin of it.
func TestStopOfSoundDaemon(t *testing.T) {
	w := newWorld(t)
	w.script(script{SlowEnd: true})
	// However slow the machine is.
	w.options.CommandLimit, w.options.EndLimit = time.Minute, time.Minute
	s := w.supervisor()
	must.Get(s.Ensure(t.Context(), one))(t)
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	must.Do(t, s.Stop(klog.NewContext(t.Context(), logger), one.ID))
	buffer, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatalf("got a %T", logger.GetSink())
	}
	if log := buffer.GetBuffer().String(); strings.Contains(log, "does not quit") || !strings.Contains(log, "stopped") {
		t.Errorf("got %s", log)
	}
}

// TestStuckFolderOfAnother: what cannot be removed of one session keeps no other from ending, or from coming back.
func TestStuckFolderOfAnother(t *testing.T) {
	w, s, _ := started(t)
	must.Get(s.Ensure(t.Context(), mps.Spec{ID: "gpu-1", Devices: []string{gpuB}}))(t)
	foreign := filepath.Join(string(w.folder("gpu-1")), "foreign")
	must.Do(t, errors.Join(os.Mkdir(foreign, 0o700), unix.Mount("foreign", foreign, "tmpfs", 0, "")))
	expect.Fails(t, s.Stop(t.Context(), "gpu-1"), "it cannot be removed")
	expect.Do(t, s.Stop(t.Context(), one.ID))
	expect.Do(t, expect.Err(s.Ensure(t.Context(), one)))
	must.Do(t, unix.Unmount(foreign, 0))
	eventually(t, "the other to be gone", func() bool { return len(s.List()) == 1 })
}

// TestFolderBoundOnTop: what somebody has mounted over a folder of a session is not emptied with it.
func TestFolderBoundOnTop(t *testing.T) {
	w, s, _ := started(t)
	foreign := filepath.Join(w.dir+".foreign", "folder")
	precious := filepath.Join(foreign, "precious")
	must.Do(t, errors.Join(os.MkdirAll(foreign, 0o700), os.WriteFile(precious, nil, 0o600)))
	t.Cleanup(func() { _ = os.RemoveAll(w.dir + ".foreign") })
	on := w.folder(one.ID).pipe()
	must.Do(t, unix.Mount(foreign, on, "", unix.MS_BIND, ""))
	t.Logf("stop: %v", s.Stop(t.Context(), one.ID))
	expect.Do(t, expect.Err(os.Lstat(precious)))
	_ = unix.Unmount(on, unix.MNT_DETACH) // it may have been
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

// TestSocketsNotWrittenDown: containers do not get the socket of a daemon that cannot be written down.
func TestSocketsNotWrittenDown(t *testing.T) {
	w, s, status := started(t)
	w.script(script{Slow: 500 * time.Millisecond})
	kill(t, daemonOf(t, s, one.ID))
	control := filepath.Join(status.PipeDir, controlSocket)
	eventually(t, "the next daemon", func() bool { _, err := os.Lstat(control); return err != nil })
	inTheWay := host.TemporaryName(s.folder(one.ID).record())
	// What was lost is just being written down there.
	eventually(t, "the way to be barred", func() bool { return os.MkdirAll(filepath.Join(inTheWay, "x"), 0o700) == nil })
	eventually(t, "a start to fail", func() bool { return strings.Contains(statusOf(t, s, one.ID).Message, "write the record") })
	if _, err := os.Lstat(control); err == nil {
		t.Error("containers got the socket")
	}
	w.script(script{})
	must.Do(t, os.RemoveAll(inTheWay))
	inEffect(t, s, reaches(t, s, one.ID, mps.Running, 1))
}
