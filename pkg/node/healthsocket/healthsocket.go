// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package healthsocket answers the kubelet's probes on a unix socket, and asks there. It is for
// sockets that nobody else may connect to: a failing probe ends a pod, so strangers must not
// be able to make one fail.
//
// The question is the name of a check in a line of its own. The answer is "ok", or "not ok: "
// and the reason. Then the server closes the connection. Nothing but the standard library's
// net is needed to ask, because the kubelet starts a program for each probe: see
// cmd/health-probe.
package healthsocket

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The names of the checks.
const (
	Liveness  = "liveness"
	Readiness = "readiness"
)

const (
	ok    = "ok"
	notOK = "not ok: "
)

// patience is how long a connection lasts. It leaves a server time to answer that a check has
// hung. The kubelet's own limit is longer, so that its event has the reason.
const patience = hangs + time.Second

// maxQuestion is how many bytes of a question are read.
const maxQuestion = 64

// Checks answer the probes. An error is the reason why a probe fails.
type Checks struct {
	Liveness, Readiness func(context.Context) error
}

// Serve answers probes on a listener until stop is called, which closes the listener. The end of
// the context does not stop it, because a process that is ending is still asked. Failed is called
// with the error if it ends before.
func Serve(ctx context.Context, listener net.Listener, checks Checks, failed func(error)) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := newServer(checks)
	s.running.Go(func() {
		if err := s.serve(ctx, listener); ctx.Err() == nil {
			failed(err)
		}
	})
	return func() {
		cancel()
		_ = listener.Close()
		s.running.Wait()
	}
}

type server struct {
	checks map[string]*check
	// running is what serves, and a goroutine for each connection.
	running sync.WaitGroup
}

func newServer(checks Checks) *server {
	return &server{checks: map[string]*check{
		Liveness:  {run: checks.Liveness},
		Readiness: {run: checks.Readiness},
	}}
}

// serve returns why it ends.
func (s *server) serve(ctx context.Context, listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		switch {
		case err == nil:
			s.running.Go(func() { s.handle(ctx, conn) })
		case mayPass(err):
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Second):
			}
		default:
			return fmt.Errorf("accept a connection: %w", err)
		}
	}
}

// mayPass reports whether connections may be accepted later, such as when too many files are open or
// there is no memory. The end of the MPS supervisor is the end of all MPS clients of the node.
func mayPass(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && (errno.Temporary() || errno == syscall.ENOMEM || errno == syscall.ENOBUFS)
}

// handle answers one question. There is nobody to tell that it could not.
func (s *server) handle(ctx context.Context, conn net.Conn) {
	hangUp := func() { _ = conn.Close() }
	defer hangUp()
	defer context.AfterFunc(ctx, hangUp)()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return
	}
	question, err := bufio.NewReaderSize(conn, maxQuestion).ReadSlice('\n')
	if err != nil {
		return
	}
	answer := ok
	if err := s.answer(ctx, strings.TrimSuffix(string(question), "\n")); err != nil {
		answer = notOK + err.Error()
	}
	_, _ = fmt.Fprintln(conn, answer)
}

func (s *server) answer(ctx context.Context, question string) error {
	check := s.checks[question]
	if check == nil {
		return fmt.Errorf("unknown check %q: want %s or %s", question, Liveness, Readiness)
	}
	return check.answer(ctx)
}

// Ask asks the process that serves on a socket. The error is the reason why the probe fails, or
// says why there is no answer.
func Ask(ctx context.Context, socket, question string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answer, err := ask(ctx, socket, question)
	if err != nil {
		return fmt.Errorf("ask %s about %s: %w", socket, question, err)
	}
	if answer == ok {
		return nil
	}
	reason, found := strings.CutPrefix(answer, notOK)
	if !found {
		return fmt.Errorf("ask %s about %s: unexpected answer %q", socket, question, answer)
	}
	return errors.New(reason)
}

func ask(ctx context.Context, socket, question string) (string, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	return exchange(ctx, conn, question)
}

func exchange(ctx context.Context, conn net.Conn, question string) (string, error) {
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	if _, err := fmt.Fprintln(conn, question); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return strings.TrimSuffix(string(answer), "\n"), err
}
