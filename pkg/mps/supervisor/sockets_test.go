// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestTenantCannotTouchTheSocket: root in a container reaches the daemon's socket for
// programs and can do nothing to it.
func TestTenantCannotTouchTheSocket(t *testing.T) {
	w, s, before := started(t)
	c := w.container(before)
	c.connects()
	results := c.does("attack")
	if len(results) < 17 {
		t.Errorf("only %d attacks: %v", len(results), results)
	}
	for name, failure := range results {
		if failure == "" {
			t.Errorf("%s: the tenant can do that", name)
		}
	}
	if got := c.does("list"); len(got) != 2 || got["list"] != "" || got["control"] != "" {
		t.Errorf("the container has %v", got)
	}
	c.connects()
	expect.Do(t, expect.Err(s.Ensure(t.Context(), one)))
	now := statusOf(t, s, one.ID)
	if now.Losses != 0 || now.Servers[0] != before.Servers[0] {
		t.Errorf("got %v, before %v", now, before)
	}
	inEffect(t, s, now)
}

// TestTenantReachesTheNextDaemon: a container that runs reaches the daemon that comes
// after the one with which it started.
func TestTenantReachesTheNextDaemon(t *testing.T) {
	w, s, before := started(t)
	c := w.container(before)
	c.connects()
	for losses, pid := range []func() int{
		func() int { return daemonOf(t, s, one.ID) }, func() int { return statusOf(t, s, one.ID).Servers[0] }, func() int { return daemonOf(t, s, one.ID) },
	} {
		kill(t, pid())
		reaches(t, s, one.ID, mps.Running, losses+1)
		c.connects()
	}
}

// TestSocketOfAnother: a daemon whose socket somebody has replaced is not believed,
// and is replaced by one that can be.
func TestSocketOfAnother(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(t *testing.T, daemon, client string){
		"by a listener": func(t *testing.T, daemon, _ string) {
			impostor(t, filepath.Join(daemon, "control"))
		},
		"for commands": func(t *testing.T, daemon, _ string) {
			impostor(t, filepath.Join(daemon, "control_privileged"))
		},
		"that containers have": func(t *testing.T, _, client string) {
			impostor(t, filepath.Join(client, "control"))
		},
		"by a symlink": func(t *testing.T, daemon, _ string) {
			path := filepath.Join(daemon, "control")
			must.Do(t, errors.Join(os.Rename(path, path+".real"), os.Symlink("control.real", path)))
		},
		"by nothing": func(t *testing.T, daemon, client string) {
			must.Do(t, errors.Join(os.Remove(filepath.Join(daemon, "control")), os.Remove(filepath.Join(client, "control"))))
		},
		"by a file": func(t *testing.T, daemon, _ string) {
			path := filepath.Join(daemon, "control_privileged")
			must.Do(t, errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, s, before := started(t, hasty)
			daemon := daemonOf(t, s, one.ID)
			f := w.folder(one.ID)
			replace(t, f.daemonPipe(), f.clientPipe())
			after := reaches(t, s, one.ID, mps.Running, 1)
			if !strings.Contains(after.LastLoss, "control") || !strings.Contains(after.LastLoss, fmt.Sprintf("PID %d", daemon)) {
				t.Errorf("got %q", after.LastLoss)
			}
			if daemonOf(t, s, one.ID) == daemon || after.Servers[0] == before.Servers[0] {
				t.Error("the daemon is the same")
			}
			inEffect(t, s, after)
			w.container(after).connects()
		})
	}
}

// impostor listens in the place of a daemon's socket. It answers nothing.
func impostor(t *testing.T, path string) {
	t.Helper()
	temporary := path + ".mine"
	listener := must.Get(net.Listen("unixpacket", temporary))(t)
	t.Cleanup(func() { _ = listener.Close() })
	must.Do(t, os.Rename(temporary, path))
}

// TestListenerOfAnother: a daemon is not taken for started while another process
// listens on its sockets.
func TestListenerOfAnother(t *testing.T) {
	w, s, _ := started(t)
	sess := locked(t, s, one.ID)
	defer sess.lock.Release(1)
	impostor(t, filepath.Join(w.folder(one.ID).daemonPipe(), "control_privileged"))
	self := must.Get(process.Identify(os.Getpid()))(t)
	if _, _, err := sess.daemon.listening(t.Context()); err == nil || !strings.Contains(err.Error(), self.String()) || !strings.Contains(err.Error(), "control_privileged") {
		t.Errorf("got %v", err)
	}
}

// TestHook: what the hook of containers reads is what the supervisor writes.
func TestHook(t *testing.T) {
	w, s, status := started(t)
	bundle := t.TempDir()
	config := fmt.Sprintf(`{"process": {"env": []}, "mounts": [{"source": %q, "destination": "/tmp/nvidia-mps"}]}`, status.PipeDir)
	must.Do(t, os.WriteFile(filepath.Join(bundle, "config.json"), []byte(config), 0o600))
	control := filepath.Join(status.PipeDir, controlSocket)
	check := func() error {
		return hook.CheckMPSClient(t.Context(), strings.NewReader(fmt.Sprintf(`{"bundle": %q}`, bundle)), control, one.ID)
	}
	expect.Do(t, check())
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Running, 1)
	expect.Do(t, check(), "after a restart")
	// The supervisor must not mend it meanwhile.
	sess := locked(t, s, one.ID)
	defer sess.lock.Release(1)
	impostor(t, control)
	expect.Says(t, check(), fmt.Sprintf("PID %d listens", os.Getpid()), "with another listener")
	if r, err := w.folder(one.ID).load(); err != nil || len(r.Sockets) != 2 {
		t.Errorf("the record is %v, %v", r, err)
	}
}

// TestContainerFiles: containers get further files of the daemon if they are to.
func TestContainerFiles(t *testing.T) {
	w, s, status := started(t, func(o *Options) { o.ExtraContainerFiles = []string{"log", "of-another-driver"} })
	c := w.container(status)
	for losses := range 2 {
		if got := c.does("list"); len(got) != 3 || got["list"] != "" || got["control"]+got["log"] != "" {
			t.Errorf("the container has %v", got)
		}
		c.connects()
		if losses == 0 {
			kill(t, daemonOf(t, s, one.ID))
			reaches(t, s, one.ID, mps.Running, 1)
		}
	}
}

// TestCrashBeforeSocketsAreKnown: the next supervisor finds out which they are.
func TestCrashBeforeSocketsAreKnown(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	before := first.ensure(t, one)
	first.end(unix.SIGKILL)
	f := w.folder(one.ID)
	r := must.Get(f.load())(t)
	want := r.Sockets
	r.Sockets = nil
	must.Do(t, f.save(r))
	s := w.supervisor()
	after := reaches(t, s, one.ID, mps.Running, 0)
	if r, err := f.load(); err != nil || len(want) != 2 || !maps.Equal(r.Sockets, want) || after.Servers[0] != before.Servers[0] {
		t.Errorf("got %v, %v, want %v", r.Sockets, err, want)
	}
}
