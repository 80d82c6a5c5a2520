// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package panics turns panics into errors.
//
// A defect that one claim or one GPU can trigger must not end the driver, again and
// again at every restart, and with it the work on all others. A panic can only be
// recovered in the goroutine where it occurs: every goroutine that works for one
// claim or one GPU needs a Recover of its own.
package panics

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/util/logchange"
)

// ErrDefect is in each error that was a panic.
var ErrDefect = errors.New("internal error in the driver")

// Recover turns a panic into an error, and logs it with its stack. It must be
// deferred:
//
//	func prepare(ctx context.Context) (err error) {
//		defer panics.Recover(ctx, &err)
func Recover(ctx context.Context, err *error) {
	if r := recover(); r != nil {
		*err = errorOf(r)
		log(ctx, *err)
	}
}

// Repeated recovers panics of something that is done again and again. A panic like
// the last one is not logged. The zero value is ready to use.
type Repeated struct {
	logged logchange.Value[string]
}

// Recover is like the function Recover. It must be deferred.
func (p *Repeated) Recover(ctx context.Context, err *error) {
	if r := recover(); r != nil {
		*err = errorOf(r)
		if p.logged.Set((*err).Error()) {
			log(ctx, *err)
		}
	}
}

func errorOf(recovered any) error {
	if err, ok := recovered.(error); ok {
		return fmt.Errorf("%w: %w", ErrDefect, err)
	}
	return fmt.Errorf("%w: %v", ErrDefect, recovered)
}

func log(ctx context.Context, err error) {
	klog.FromContext(ctx).Error(err, "Recovered from a panic, please report this", "stack", string(debug.Stack()))
}
