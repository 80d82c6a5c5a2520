// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"runtime/debug"

	"k8s.io/klog/v2"
)

// recoverAs turns a panic into an error. It must be deferred.
//
// A defect that one claim or one GPU can trigger must not end the driver, again and
// again at every restart, and with it the work on all others.
func recoverAs(ctx context.Context, err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("internal error in the driver: %v", r)
		klog.FromContext(ctx).Error(*err, "Recovered from a panic, please report this", "stack", string(debug.Stack()))
	}
}
