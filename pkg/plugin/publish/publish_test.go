// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/partage-dev/partage/pkg/policy"
)

func invalid(path string) *apierrors.StatusError {
	errs := field.ErrorList{field.Invalid(field.NewPath(path), "probe", "must be in this slice")}
	return apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "", errs)
}

// invalidWithoutField is how an admission policy refuses.
func invalidWithoutField() *apierrors.StatusError {
	err := invalid("spec")
	err.ErrStatus.Details.Causes = nil
	return err
}

func etcdIsAway(*http.Request) *apierrors.StatusError {
	return apierrors.NewInternalError(errors.New("etcd is away"))
}

// TestPublish: what is published follows what the API server stores.
func TestPublish(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy           *policy.Policy
		change           func(*apiServer)
		devices, counter int
	}{
		"counters are stored":  {withoutShares(), func(*apiServer) {}, 4, 1},
		"counters are dropped": {withoutShares(), func(api *apiServer) { api.DropCounters(true) }, 1, 0},
		"counters are refused": {withoutShares(), func(api *apiServer) {
			api.Refuse(func(req *http.Request) *apierrors.StatusError {
				if req.Method == http.MethodPost && req.URL.Query().Has("dryRun") {
					return invalid("spec.devices[0].consumesCounters[0].counterSet")
				}
				return nil
			})
		}, 1, 0},
		"shares are dropped": {policy.Builtin(), func(api *apiServer) { api.DropShares(true) }, 4, 1},
		"shares are stored":  {policy.Builtin(), func(*apiServer) {}, 6, 1},
		"it fails at first": {withoutShares(), func(api *apiServer) {
			var mu sync.Mutex
			left := map[string]int{http.MethodPost: 2, http.MethodGet: 2}
			api.Refuse(func(req *http.Request) *apierrors.StatusError {
				mu.Lock()
				defer mu.Unlock()
				if left[req.Method] == 0 {
					return nil
				}
				left[req.Method]--
				if req.Method == http.MethodGet {
					return etcdIsAway(req)
				}
				return invalidWithoutField()
			})
		}, 4, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := newAPIServer(t)
			test.change(api)
			start(t, api, "one", inventoryOf(t, test.policy, firstGPU)).untilPublished(t, test.devices, test.counter)
		})
	}
}

// TestGateTurnedOff: the API server is restarted with a gate off while the
// publisher runs. Whole GPUs and partitions must not stay published without
// counters; and a share that is stored without what makes it one would be given to
// one claim as a whole.
func TestGateTurnedOff(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy                        *policy.Policy
		drop                          func(*apiServer, bool)
		before, devices, counterAfter int
	}{
		"counters": {withoutShares(), (*apiServer).DropCounters, 4, 1, 0},
		"shares":   {policy.Builtin(), (*apiServer).DropShares, 6, 4, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, newAPIServer(t), "one", inventoryOf(t, test.policy, firstGPU))
			r.untilPublished(t, test.before, 1)
			test.drop(r.api, true)
			r.api.DeleteSlices()
			r.untilPublished(t, test.devices, test.counterAfter)
		})
	}
}

// TestDeletedSlicesComeBack: all of them, as a starting kubelet does it, or one,
// as an administrator does. The publisher notices by itself.
func TestDeletedSlicesComeBack(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]func(*apiServer){
		"all": (*apiServer).DeleteSlices,
		"one": func(api *apiServer) { api.DeleteSlice(api.Slices()[0].Name) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, newAPIServer(t), "one", inventoryOf(t, withoutShares(), firstGPU))
			r.untilPublished(t, 4, 1)
			// Before the watch has begun, perhaps, and after.
			for range 2 {
				remove(r.api)
				r.untilPublished(t, 4, 1)
			}
		})
	}
}

// TestCheckStored: other content than was published is no reason to publish again,
// or two instances of different versions would never stop.
func TestCheckStored(t *testing.T) {
	t.Parallel()
	r := start(t, newAPIServer(t), "one", inventoryOf(t, withoutShares(), firstGPU))
	r.untilPublished(t, 4, 1)
	if err := r.publisher.checkStored(t.Context()); err != nil {
		t.Errorf("a complete pool: %v", err)
	}
	r.api.Refuse(etcdIsAway)
	if err := r.publisher.checkStored(t.Context()); err == nil || !strings.Contains(err.Error(), "etcd is away") {
		t.Errorf("an API server that is away: %v", err)
	}
}

// TestInstancesDoNotFight: the old instance of an upgrade keeps publishing a GPU
// that was lost, which the new one has never seen. The last to publish prevails,
// and the other one leaves it at that.
func TestInstancesDoNotFight(t *testing.T) {
	t.Parallel()
	const oldName, newName = "old", "new"
	api := newAPIServer(t)
	var mu sync.Mutex
	lists, writes := map[string]int{}, 0
	api.Refuse(func(req *http.Request) *apierrors.StatusError {
		mu.Lock()
		defer mu.Unlock()
		query := req.URL.Query()
		switch {
		case !strings.HasSuffix(req.URL.Path, "/resourceslices") && !strings.Contains(req.URL.Path, "/resourceslices/"):
		case req.Method == http.MethodGet && !query.Has("watch") && !query.Has("resourceVersion"):
			lists[req.UserAgent()]++
		case req.Method != http.MethodGet && !query.Has("dryRun"):
			writes++
		}
		return nil
	})
	seen := func(name string) int {
		mu.Lock()
		defer mu.Unlock()
		return lists[name]
	}
	older := start(t, api, oldName, inventoryOf(t, withoutShares(), firstGPU, secondGPU))
	older.untilPublished(t, 8, 2)
	mu.Lock()
	writes = 0
	mu.Unlock()
	published := older.controller.publications()

	newer := start(t, api, newName, inventoryOf(t, withoutShares(), firstGPU))
	newer.untilPublished(t, 4, 1)
	// The old one checks twice what is stored. Its reaction to the first check has
	// happened when it begins the second one.
	for range 2 {
		before := seen(oldName)
		older.publisher.Recheck()
		until(t, "a check of the old instance", func() error {
			if seen(oldName) == before {
				return errors.New("not yet")
			}
			return nil
		})
	}
	if got := older.controller.publications(); got != published {
		t.Errorf("the old instance has published %d times more", got-published)
	}
	newer.untilPublished(t, 4, 1)
	mu.Lock()
	defer mu.Unlock()
	// Two slices are updated and one is deleted. A conflict may repeat that; a fight
	// goes on and on.
	if writes < 3 || writes > 10 {
		t.Errorf("%d writes, want 3 and a few more at most", writes)
	}
}

// refusing is a helper that cannot publish.
type refusing struct{}

func (refusing) PublishResources(context.Context, resourceslice.DriverResources) error {
	return errors.New("no owner")
}

// TestRunFails: an error of the helper is not retried.
func TestRunFails(t *testing.T) {
	t.Parallel()
	// Only for its client.
	r := start(t, newAPIServer(t), "one", inventoryOf(t, withoutShares(), firstGPU))
	p := New(Options{
		DriverName: testDriver, NodeName: testNode, KubeClient: r.controller.client, Report: func(context.Context, string) {},
	})
	p.SetInventory(inventoryOf(t, withoutShares(), firstGPU))
	if err := p.Run(t.Context(), refusing{}); err == nil || !strings.Contains(err.Error(), "no owner") {
		t.Errorf("got %v", err)
	}
}
