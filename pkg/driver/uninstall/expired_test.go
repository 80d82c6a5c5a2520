// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// TestCheckExpiredAgainAndAgain: pages that always belong to another list are not read
// again without a pause.
func TestCheckExpiredAgainAndAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests := 0
		lister := &fakeLister{fail: func(ctx context.Context) error {
			requests++
			time.Sleep(time.Millisecond)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return apierrors.NewResourceExpired("too old")
		}}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		if err := Check(ctx, lister, driver); err == nil {
			t.Error("nothing in use")
		}
		if requests > 200 {
			t.Errorf("%d requests in two minutes", requests)
		}
	})
}
