// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

func (r *rig) untilReconciled(t *testing.T, times int) {
	t.Helper()
	r.until(t, "cleaning up", func(context.Context) error {
		if _, got := r.claims.counts(); got < times {
			return fmt.Errorf("%d times, want %d", got, times)
		}
		return nil
	})
}

// TestReconcileGoesOn: with and without a driver, whether it succeeds or not.
func TestReconcileGoesOn(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*rig){
		"all is well": func(*rig) {},
		"it fails":    func(r *rig) { r.claims.reconcileErr = errors.New("GPU 0000:1b:00.0 is in use") },
		"no driver":   func(r *rig) { r.hardware.setError(errors.New("no driver")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			change(r)
			r.start(t)
			r.untilReconciled(t, 4)
		})
	}
}

// TestFailedClaimIsFollowedUp: without waiting for the next interval.
func TestFailedClaimIsFollowedUp(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context, drapb.DRAPluginClient, *drapb.Claim) error{
		"prepare": func(ctx context.Context, kubelet drapb.DRAPluginClient, c *drapb.Claim) error {
			_, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
			return err
		},
		"unprepare": func(ctx context.Context, kubelet drapb.DRAPluginClient, _ *drapb.Claim) error {
			stuck := &drapb.Claim{Namespace: "default", Name: "stuck", Uid: "stuck"}
			_, err := kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{stuck}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			// By themselves, the loops would do nothing for longer than a test may take.
			r.options.ReconcileInterval = 10 * eventually
			r.options.PollInterval = 10 * eventually
			r.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error { return errors.New("no") }
			r.start(t)
			kubelet := r.register(t)
			r.untilReconciled(t, 1)
			r.untilPublished(t, 4, 1)
			surveys, _ := r.claims.counts()
			if err := call(t.Context(), kubelet, r.claim("one")); err != nil {
				t.Fatal(err)
			}
			r.untilReconciled(t, 2)
			r.until(t, "a survey", func(context.Context) error {
				if got, _ := r.claims.counts(); got <= surveys {
					return errors.New("not yet")
				}
				return nil
			})
		})
	}
}

// TestRefusedClaimIsNotFollowedUp: users' mistakes are no reason to clean up.
func TestRefusedClaimIsNotFollowedUp(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.ReconcileInterval = 10 * eventually
	r.options.PollInterval = 10 * eventually
	r.claims.onPrepare = func(_ context.Context, c *resourceapi.ResourceClaim) error {
		if c.Name == "broken" {
			return fmt.Errorf("device gpu-0000-1b-00-0: %w", errors.New("no"))
		}
		return &claim.RefusedError{Err: errors.New("invalid configuration")}
	}
	r.start(t)
	kubelet := r.register(t)
	r.untilReconciled(t, 1)
	prepare := func(name string) {
		t.Helper()
		request := &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{r.claim(name)}}
		if _, err := kubelet.NodePrepareResources(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		prepare("invalid")
	}
	// The first that is followed up is the one that follows.
	prepare("broken")
	r.untilReconciled(t, 2)
	if _, got := r.claims.counts(); got != 2 {
		t.Errorf("cleaned up %d times, want once at the start and once for the claim that failed", got)
	}
}

// TestUnprepareWithoutDriverIsFollowedUp: it succeeds and leaves the rest, also
// when the driver comes while it runs.
func TestUnprepareWithoutDriverIsFollowedUp(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.ReconcileInterval = 10 * eventually
	r.options.PollInterval = 10 * eventually
	r.hardware.setError(errors.New("no driver"))
	r.start(t)
	kubelet := r.register(t)
	r.untilReconciled(t, 1)
	claim := &drapb.Claim{Namespace: "default", Name: "one", Uid: "one"}
	if _, err := kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}}); err != nil {
		t.Fatal(err)
	}
	r.untilReconciled(t, 2)
}
