// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

// published counts what the API server holds.
func published(slices []resourceapi.ResourceSlice) (devices, counterSets int) {
	for _, slice := range slices {
		devices += len(slice.Spec.Devices)
		counterSets += len(slice.Spec.SharedCounters)
	}
	return devices, counterSets
}

// untilPublished waits for exactly these numbers; a test GPU is one whole GPU
// and three partitions.
func (r *rig) untilPublished(t *testing.T, devices, counterSets int) {
	t.Helper()
	r.until(t, "publication", func(ctx context.Context) error {
		if d, c := published(r.api.Slices()); d != devices || c != counterSets {
			return fmt.Errorf("%d devices and %d counter sets, want %d and %d", d, c, devices, counterSets)
		}
		return r.check(ctx, "readiness")
	})
}

func invalid(path string) *apierrors.StatusError {
	errs := field.ErrorList{field.Invalid(field.NewPath(path), "probe", "must be in this slice")}
	return apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "", errs)
}

func TestPublish(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change           func(*rig)
		devices, counter int
	}{
		"counters are stored":  {func(*rig) {}, 4, 1},
		"counters are dropped": {func(r *rig) { r.api.DropCounters(true) }, 1, 0},
		"counters are refused": {func(r *rig) {
			r.api.Refuse(func(req *http.Request) *apierrors.StatusError {
				if req.Method == http.MethodPost && req.URL.Query().Has("dryRun") {
					return invalid("spec.devices[0].consumesCounters[0].counterSet")
				}
				return nil
			})
		}, 1, 0},
		"shares are dropped": {func(r *rig) { r.policy.set(policy.Builtin(), nil); r.api.DropShares(true) }, 4, 1},
		"shares are stored":  {func(r *rig) { r.policy.set(policy.Builtin(), nil) }, 6, 1},
		"trouble at first": {func(r *rig) {
			var mu sync.Mutex
			left := map[string]int{http.MethodPost: 2, http.MethodGet: 2}
			r.api.Refuse(func(req *http.Request) *apierrors.StatusError {
				mu.Lock()
				defer mu.Unlock()
				if left[req.Method] == 0 {
					return nil
				}
				left[req.Method]--
				if req.Method == http.MethodGet {
					return apierrors.NewInternalError(errors.New("etcd is away"))
				}
				// How an admission policy refuses: invalid, without a field.
				return invalidWithoutField()
			})
		}, 4, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			test.change(r)
			r.start(t)
			r.untilPublished(t, test.devices, test.counter)
		})
	}
}

func invalidWithoutField() *apierrors.StatusError {
	err := invalid("spec")
	err.ErrStatus.Details.Causes = nil
	return err
}

// TestGateTurnedOff: the API server is restarted with the gate off while the
// plugin runs; whole GPUs and partitions must not stay published without
// counters.
func TestGateTurnedOff(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.api.DropCounters(true)
	r.api.DeleteSlices()
	r.register(t)
	r.untilPublished(t, 1, 0)
}

// TestShareGateTurnedOff likewise: a share that is stored without what makes it one
// would be given to one claim as a whole.
func TestShareGateTurnedOff(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.policy.set(policy.Builtin(), nil)
	r.start(t)
	r.untilPublished(t, 6, 1)
	r.api.DropShares(true)
	r.api.DeleteSlices()
	r.register(t)
	r.untilPublished(t, 4, 1)
}

// TestDeletedSlicesComeBack: all of them, as a starting kubelet does it, or one,
// as an administrator does. Nobody has to register for that.
func TestDeletedSlicesComeBack(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]func(*fakeapi.Server){
		"all": (*fakeapi.Server).DeleteSlices,
		"one": func(api *fakeapi.Server) { api.DeleteSlice(api.Slices()[0].Name) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.start(t)
			r.untilPublished(t, 4, 1)
			// Before the watch has begun, perhaps, and after.
			for range 2 {
				remove(r.api)
				r.untilPublished(t, 4, 1)
			}
		})
	}
}

// TestRegistrationChecks: a kubelet that registers the plugin may have deleted
// slices before there was anybody to see it.
func TestRegistrationChecks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.api.DeleteSlices()
	r.register(t)
	r.untilPublished(t, 4, 1)
}

// TestMissing: more than was published is no reason to publish again, or two
// instances of different versions would never stop.
func TestMissing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	if r.plugin.missing(t.Context()) {
		t.Error("a complete pool lacks something")
	}
	r.api.Refuse(func(*http.Request) *apierrors.StatusError {
		return apierrors.NewInternalError(errors.New("etcd is away"))
	})
	if !r.plugin.missing(t.Context()) {
		t.Error("nothing is missing although nobody knows")
	}
}
