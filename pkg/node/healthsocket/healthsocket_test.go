// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package healthsocket

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/test/must"
)

// listen returns a listener on a socket of the test's own.
func listen(t *testing.T) (listener net.Listener, socket string) {
	t.Helper()
	dir := must.Get(os.MkdirTemp("/tmp", "h"))(t) // t.TempDir's is too long for a socket
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket = filepath.Join(dir, "s")
	return must.Get((&net.ListenConfig{}).Listen(t.Context(), "unix", socket))(t), socket
}

func TestServe(t *testing.T) {
	listener, socket := listen(t)
	stop := Serve(t.Context(), listener, Checks{
		Liveness: func(context.Context) error { return nil },
		Readiness: func(context.Context) error {
			return errors.Join(errors.New("no driver in /usr/läb"), errors.New("not registered"))
		},
	}, func(err error) { t.Error(err) })
	for question, want := range map[string]string{
		Liveness:                  "",
		Readiness:                 "no driver in /usr/läb\nnot registered",
		"":                        `unknown check "": want liveness or readiness`,
		"startup":                 `unknown check "startup": want liveness or readiness`,
		strings.Repeat("x", 1000): "connection reset by peer",
	} {
		err := Ask(t.Context(), socket, question)
		if want == "" && err != nil || want != "" && (err == nil || !strings.HasSuffix(err.Error(), want)) {
			t.Errorf("%q: got %v, want %q", question, err, want)
		}
	}
	stop()
	if err := Ask(t.Context(), socket, Liveness); !errors.Is(err, os.ErrNotExist) || !strings.HasPrefix(err.Error(), "ask "+socket+" about liveness: ") {
		t.Errorf("after the end: got %v", err)
	}
}

func TestServeFails(t *testing.T) {
	listener, _ := listen(t)
	must.Do(t, listener.Close())
	failed := make(chan error, 1)
	stop := Serve(t.Context(), listener, Checks{}, func(err error) { failed <- err })
	defer stop()
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v", err)
	}
}

// conns is a listener on what is in the channel: errors and connections.
type conns chan any

func (c conns) Accept() (net.Conn, error) {
	switch next := (<-c).(type) {
	case net.Conn:
		return next, nil
	case error:
		return nil, next
	default:
		return nil, net.ErrClosed
	}
}

func (c conns) Close() error { close(c); return nil }

func (c conns) Addr() net.Addr { return &net.UnixAddr{} }

// TestStop: it waits neither for a check that hangs nor for somebody who says nothing.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := make(chan struct{})
		defer close(end)
		listener := make(conns)
		stop := Serve(t.Context(), listener, Checks{Liveness: func(context.Context) error {
			<-end
			return nil
		}}, func(err error) { t.Error(err) })
		silent, _ := net.Pipe()
		listener <- silent
		theirs, ours := net.Pipe()
		listener <- theirs
		answered := make(chan string, 1)
		go func() {
			answer, _ := exchange(t.Context(), ours, Liveness)
			answered <- answer
		}()
		synctest.Wait()
		began := time.Now()
		stop()
		if answer := <-answered; answer == ok {
			t.Error("the answer of a check that hangs is that all is well")
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("it took %s", took)
		}
	})
}

// TestCannotAccept: a process that cannot take a connection for a while answers afterwards.
func TestCannotAccept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listener := make(conns)
		stop := Serve(t.Context(), listener, Checks{Liveness: func(context.Context) error { return nil }}, func(err error) { t.Error(err) })
		defer stop()
		began := time.Now()
		for _, errno := range []syscall.Errno{syscall.EMFILE, syscall.ENOMEM, syscall.ENOBUFS} {
			listener <- error(&net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", errno)})
		}
		theirs, ours := net.Pipe()
		listener <- theirs
		if answer, err := exchange(t.Context(), ours, Liveness); err != nil || answer != ok {
			t.Errorf("got %q, %v", answer, err)
		}
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("it went on after %s", took)
		}
	})
}

// TestSilent: who says nothing is hung up on.
func TestSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		s := newServer(Checks{Liveness: func(context.Context) error { calls.Add(1); return nil }})
		theirs, ours := net.Pipe()
		began := time.Now()
		go s.handle(t.Context(), theirs)
		var b [1]byte
		if n, err := ours.Read(b[:]); n > 0 || err == nil {
			t.Errorf("got %d bytes, %v", n, err)
		}
		if took := time.Since(began); took != patience || calls.Load() > 0 {
			t.Errorf("hung up after %s and %d checks", took, calls.Load())
		}
	})
}

// TestNoServer: whatever a process answers that is no server of this protocol, it is not well.
func TestNoServer(t *testing.T) {
	for _, answer := range []string{"", "\n", "OK\n", "okay\n", "not ok\n", "HTTP/1.1 400 Bad Request\r\n\r\n"} {
		listener, socket := listen(t)
		go func() {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, maxQuestion))
			_, _ = conn.Write([]byte(answer))
			_ = conn.Close()
		}()
		if err := Ask(t.Context(), socket, Liveness); err == nil || !strings.Contains(err.Error(), "unexpected answer") {
			t.Errorf("%q: got %v", answer, err)
		}
		_ = listener.Close()
	}
}

// TestAskTimesOut: a process that takes connections and never answers is not well.
func TestAskTimesOut(t *testing.T) {
	for name, read := range map[string]int{"before it has the question": 0, "after": maxQuestion} {
		synctest.Test(t, func(t *testing.T) {
			theirs, ours := net.Pipe()
			go func() { _, _ = theirs.Read(make([]byte, read)) }()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if answer, err := exchange(ctx, ours, Liveness); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: got %q, %v", name, answer, err)
			}
		})
	}
}

// TestKubeletWaitsLonger: else its event says that a probe took too long, and not the reason.
func TestKubeletWaitsLonger(t *testing.T) {
	limit := regexp.MustCompile(`timeoutSeconds: (\d+)`)
	for _, template := range []string{"daemonset.yaml", "mps-supervisor.yaml"} {
		text := must.Get(os.ReadFile(filepath.Join("../../../deployments/helm/partage/templates", template)))(t)
		found := limit.FindAllSubmatch(text, -1)
		if len(found) != 3 {
			t.Errorf("%s: %d probes, want 3", template, len(found))
		}
		for _, f := range found {
			// A second is for the start of the program.
			if seconds, err := strconv.Atoi(string(f[1])); err != nil || time.Duration(seconds)*time.Second < patience+time.Second {
				t.Errorf("%s: %s, %v: want more than %s", template, f[0], err, patience)
			}
		}
	}
}
