// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// TestReconcileGoesOn: with and without a driver, whether something is left or not.
func TestReconcileGoesOn(t *testing.T) {
	t.Parallel()
	left := errors.New("GPU 0000:1b:00.0 is in use")
	for name, change := range map[string]func(*bubble){
		"all is well":       func(*bubble) {},
		"something is left": func(b *bubble) { b.claims.left = left },
		"no driver":         func(b *bubble) { b.hardware.setError(errors.New("no driver")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newBubble(t)
				change(b)
				defer b.run()()
				pass(3 * b.options.PollInterval)
				if rounds := b.claims.rounds(); rounds < 4 {
					t.Errorf("%d rounds", rounds)
				}
				if told := strings.Count(b.logs.String(), left.Error()); told > 0 != (b.claims.left != nil) || told > 1 {
					t.Errorf("it is logged %d times:\n%s", told, b.logs)
				}
			})
		})
	}
}

// TestFailedClaimIsFollowedUp: without waiting for the next interval, unless it is the mistake of a user, or all is done.
func TestFailedClaimIsFollowedUp(t *testing.T) {
	t.Parallel()
	prepare := func(err error) func(b *bubble) {
		return func(b *bubble) {
			b.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error { return err }
			_, _ = b.service.PrepareResourceClaims(b.ctx, []*resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{UID: "one"}}})
		}
	}
	unprepare := func(b *bubble, uid string) {
		_, _ = b.service.UnprepareResourceClaims(b.ctx, []kubeletplugin.NamespacedObject{{UID: types.UID(uid)}})
	}
	for name, test := range map[string]struct {
		call func(b *bubble)
		want int
	}{
		"prepare":                   {prepare(errors.New("no")), 1},
		"prepare, refused":          {prepare(&claim.RefusedError{Err: errors.New("invalid configuration")}), 0},
		"prepare, done":             {prepare(nil), 0},
		"unprepare":                 {func(b *bubble) { unprepare(b, "stuck") }, 1},
		"unprepare, done":           {func(b *bubble) { unprepare(b, "one") }, 0},
		"unprepare, without driver": {func(b *bubble) { unprepare(b, "one") }, 1}, // the rest is left, also when the driver comes while it runs
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newBubble(t)
				if strings.Contains(name, "without driver") {
					b.hardware.setError(errors.New("no driver"))
				}
				defer b.run()()
				synctest.Wait()
				before := b.claims.rounds()
				test.call(b)
				synctest.Wait()
				if got := b.claims.rounds() - before; got != test.want {
					t.Errorf("it is cleaned up %d times after it, want %d", got, test.want)
				}
			})
		})
	}
}
