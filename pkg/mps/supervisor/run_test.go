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
)

// running is a supervisor with its socket. end is idempotent.
func (w *world) running() (client mps.Client, end func()) {
	w.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, w.options) }()
	client = mps.Client{Socket: filepath.Join(w.dir, mps.SocketName)}
	done := false
	end = func() {
		cancel()
		if !done {
			done = true
			if err := <-ended; err != nil {
				w.Errorf("Run: %v", err)
			}
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
	if all, err := client.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("got %v, %v", all, err)
	}
	status, err := client.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(one, status.Spec); diff != "" || status.Phase != mps.Running || len(status.Servers) != 1 {
		t.Errorf("got %v, -want +got:\n%s", status, diff)
	}
	if all, err := client.List(t.Context()); err != nil || !cmp.Equal(all, []mps.Status{status}) {
		t.Errorf("got %v, %v", all, err)
	}

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
	if _, err := client.Ensure(t.Context(), mps.Spec{ID: "b", Devices: []string{gpuB}}); err == nil || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("got %v", err)
	}
	w.script(script{Slow: time.Minute})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := client.Ensure(ctx, mps.Spec{ID: "b", Devices: []string{gpuB}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	w.script(script{})
	eventually(t, "the cancelled start to be undone", func() bool {
		all, err := client.List(t.Context())
		return err == nil && len(all) == 1
	})
	w.nothingLeft("b")

	for range 2 {
		if err := client.Stop(t.Context(), one.ID); err != nil {
			t.Error(err)
		}
	}
	end()
	if _, err := client.List(t.Context()); !errors.Is(err, mps.ErrUnavailable) || !strings.Contains(err.Error(), w.dir) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(filepath.Join(w.dir, mps.SocketName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
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
	if _, err := client.List(t.Context()); err != nil {
		t.Error(err)
	}
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
	if err := <-failed; err == nil {
		t.Error("no error")
	}
	w.nothingLeft(one.ID)
}

// TestNoSocket: a supervisor that cannot listen does not end what runs.
func TestNoSocket(t *testing.T) {
	w := newWorld(t)
	first := w.other()
	first.ensure(t, one)
	first.end(unix.SIGKILL)
	before, err := w.folder(one.ID).load()
	if err != nil {
		t.Fatal(err)
	}
	inTheWay := filepath.Join(w.dir, mps.SocketName)
	if err := errors.Join(os.Remove(inTheWay), os.Mkdir(inTheWay, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := Run(t.Context(), w.options); err == nil || !strings.Contains(err.Error(), inTheWay) {
		t.Errorf("got %v", err)
	}
	if !before.Daemon.Alive() {
		t.Error("the daemon has ended")
	}
	if err := os.RemoveAll(inTheWay); err != nil {
		t.Fatal(err)
	}
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
	if err := Run(ctx, w.options); err != nil {
		t.Errorf("one that is not waited for: %v", err)
	}
	end()
	w.running()
}
