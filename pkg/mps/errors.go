// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Errors that those of a supervisor wrap, and the first one that those of Client do.
var (
	// ErrUnavailable: nothing answers on the supervisor's socket, or the supervisor
	// ended during the call. What it started may still run.
	ErrUnavailable = errors.New("the MPS supervisor does not answer")
	// ErrInvalid: the Spec is not valid.
	ErrInvalid = errors.New("not a valid MPS session")
	// ErrDiffers: the session runs, and the Spec differs in what cannot be changed
	// while it does.
	ErrDiffers = errors.New("cannot be changed while the MPS session runs")
	// ErrFaulted: a client's fault ended all clients, and the server accepts no new
	// ones until those have ended.
	ErrFaulted = errors.New("the MPS session accepts no clients after a fault")
)

// remoteError is an error of the supervisor: its text, and what it wraps.
type remoteError struct {
	text string
	err  error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.err }

// fromStatus returns the error that the supervisor on the socket had. It wraps that of a context, if there was one.
func fromStatus(socket string, err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	switch s.Code() {
	case codes.Unavailable:
		return fmt.Errorf("%w on %s: %s", ErrUnavailable, socket, s.Message())
	case codes.Unimplemented:
		return fmt.Errorf("the MPS supervisor is older than this program: %s", s.Message())
	}
	return &remoteError{
		text: s.Message(), err: map[codes.Code]error{codes.DeadlineExceeded: context.DeadlineExceeded, codes.Canceled: context.Canceled}[s.Code()],
	}
}
