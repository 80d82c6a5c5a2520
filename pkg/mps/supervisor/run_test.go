// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

func (w *world) caller() *mps.Client {
	w.Helper()
	client := must.Get(mps.NewClient(filepath.Join(w.dir, mps.SocketName)))(w)
	w.Cleanup(func() { _ = client.Close() })
	return client
}

// running is a supervisor with its socket. end is idempotent.
func (w *world) running() (client *mps.Client, end func()) {
	w.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, w.options) }()
	client = w.caller()
	done := false
	end = func() {
		cancel()
		if !done {
			done = true
			expect.Do(w, <-ended, "Run")
		}
	}
	w.Cleanup(end)
	eventually(w, "the socket", func() bool {
		_, err := client.List(context.Background())
		return err == nil
	})
	return client, end
}

func TestClient(t *testing.T) {
	w := newWorld(t)
	// One that was killed has left its socket.
	if listener, err := net.Listen("unix", filepath.Join(w.dir, mps.SocketName)); err != nil {
		t.Fatal(err)
	} else if unix, ok := listener.(*net.UnixListener); ok {
		unix.SetUnlinkOnClose(false)
		_ = listener.Close()
	}
	client, end := w.running()
	if info, err := os.Stat(filepath.Join(w.dir, mps.SocketName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info.Mode(), err)
	}
	expect.Len(t, must.Get(client.List(t.Context()))(t), 0)
	status := must.Get(client.Ensure(t.Context(), one))(t)
	if diff := cmp.Diff(one, status.Spec); diff != "" || status.Phase != mps.Running || len(status.Servers) != 1 {
		t.Errorf("got %v, -want +got:\n%s", status, diff)
	}
	expect.Same(t, must.Get(client.List(t.Context()))(t), []mps.Status{status})

	// Errors keep their text.
	for want, spec := range map[string]mps.Spec{
		mps.ErrInvalid.Error(): {ID: "no/label", Devices: []string{gpuA}},
		mps.ErrDiffers.Error(): {ID: one.ID, Devices: []string{gpuB}},
	} {
		_, err := client.Ensure(t.Context(), spec)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), spec.ID) || strings.Contains(err.Error(), "rpc error") {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	w.script(script{Exit: "no such device"})
	expect.Says(t, expect.Err(client.Ensure(t.Context(), mps.Spec{ID: "b", Devices: []string{gpuB}})), "no such device")
	w.script(script{Slow: time.Minute})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	expect.Is(t, expect.Err(client.Ensure(ctx, mps.Spec{ID: "b", Devices: []string{gpuB}})), context.DeadlineExceeded)
	w.script(script{})
	eventually(t, "the cancelled start to be undone", func() bool {
		all, err := client.List(t.Context())
		return err == nil && len(all) == 1
	})
	w.nothingLeft("b")

	for range 2 {
		expect.Do(t, client.Stop(t.Context(), one.ID))
	}
	end()
	if _, err := client.List(t.Context()); !errors.Is(err, mps.ErrUnavailable) || !strings.Contains(err.Error(), w.dir) {
		t.Errorf("got %v", err)
	}
	expect.Is(t, expect.Err(os.Stat(filepath.Join(w.dir, mps.SocketName))), os.ErrNotExist, "the socket is left")
}

// TestClientFindsTheNext: after many failed calls a client reaches the next supervisor
// with its first call.
func TestClientFindsTheNext(t *testing.T) {
	w := newWorld(t)
	client, end := w.running()
	end()
	for range 10 {
		if _, err := client.List(t.Context()); !errors.Is(err, mps.ErrUnavailable) {
			t.Fatalf("got %v", err)
		}
	}
	w.running()
	expect.Do(t, expect.Err(client.List(t.Context())))
}

// TestEndInStart: what a call was doing when the supervisor was told to end is
// undone before it ends.
func TestEndInStart(t *testing.T) {
	w := newWorld(t)
	client, end := w.running()
	w.script(script{Slow: time.Minute})
	failed := make(chan error, 1)
	go func() {
		_, err := client.Ensure(t.Context(), one)
		failed <- err
	}()
	eventually(t, "the start", func() bool { return w.keeps(one.ID) })
	end()
	expect.Fails(t, <-failed)
	w.nothingLeft(one.ID)
}

// TestNoSocket: a supervisor that cannot listen does not end what runs.
func TestNoSocket(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	first.ensure(t, one)
	first.end(unix.SIGKILL)
	before := must.Get(w.folder(one.ID).load())(t)
	inTheWay := filepath.Join(w.dir, mps.SocketName)
	must.Do(t, errors.Join(os.Remove(inTheWay), os.Mkdir(inTheWay, 0o700)))
	expect.Says(t, Run(t.Context(), w.options), inTheWay)
	if !before.Daemon.Alive() {
		t.Error("the daemon has ended")
	}
	must.Do(t, os.RemoveAll(inTheWay))
	client, _ := w.running()
	if all, err := client.List(t.Context()); err != nil || len(all) != 1 || all[0].Losses != 0 {
		t.Errorf("got %v, %v", all, err)
	}
}

func TestWaitForLock(t *testing.T) {
	w := newWorld(t)
	_, end := w.running()
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockInterval)
	defer cancel()
	expect.Do(t, Run(ctx, w.options), "one that is not waited for")
	end()
	w.running()
}
