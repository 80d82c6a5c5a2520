// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"runtime/debug"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/logchange"
)

// recoverAs turns a panic into an error, and logs it with its stack. It must be
// deferred.
//
// A defect that one claim or one GPU can trigger must not end the driver, again and
// again at every restart, and with it the work on all others.
func recoverAs(ctx context.Context, err *error) {
	if r := recover(); r != nil {
		*err = panicError(r)
		logPanic(ctx, *err)
	}
}

// loopPanics is recoverAs for something that is done again and again: the same panic
// is logged once.
type loopPanics struct {
	logged logchange.Value[string]
}

func (p *loopPanics) recoverAs(ctx context.Context, err *error) {
	if r := recover(); r != nil {
		*err = panicError(r)
		if p.logged.Set((*err).Error()) {
			logPanic(ctx, *err)
		}
	}
}

func panicError(recovered any) error {
	return fmt.Errorf("internal error in the driver: %v", recovered)
}

func logPanic(ctx context.Context, err error) {
	klog.FromContext(ctx).Error(err, "Recovered from a panic, please report this", "stack", string(debug.Stack()))
}
