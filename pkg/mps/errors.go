// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import "errors"

// What errors of Supervisor and Client wrap, where a caller may want to know.
var (
	// ErrUnavailable: nobody answers on the supervisor's socket, or the supervisor
	// ended during the call. What it started may run on.
	ErrUnavailable = errors.New("the MPS supervisor does not answer")
	// ErrInvalid: the Spec cannot be meant.
	ErrInvalid = errors.New("not a valid MPS session")
	// ErrDiffers: the session runs with what cannot be changed while it does.
	ErrDiffers = errors.New("cannot be changed while the MPS session runs")
	// ErrFaulted: a client's fault ended all clients, and there will be no new ones
	// before those have gone.
	ErrFaulted = errors.New("the MPS session takes no clients after a fault")
)
