// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"time"

	"github.com/partage-dev/partage/pkg/host"
)

type arrivalKey struct{}

// Arrived stamps the time at which a call arrived. A Prepare that arrived before
// the claim was released is refused, however long it waited since. Without a
// stamp, Prepare and Unprepare take the time at which they are called.
func Arrived(ctx context.Context) context.Context { return arrivedAt(ctx, host.SinceBoot()) }

func arrivedAt(ctx context.Context, at time.Duration) context.Context {
	return context.WithValue(ctx, arrivalKey{}, at)
}

// arrival returns when the call arrived, on the clock of host.SinceBoot.
func arrival(ctx context.Context, now func() time.Duration) time.Duration {
	if at, stamped := ctx.Value(arrivalKey{}).(time.Duration); stamped {
		return at
	}
	return now()
}
