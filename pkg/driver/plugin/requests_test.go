// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// TestWatchesOwnNode: nothing lists or watches the objects of other nodes. In a cluster
// with 5,000 nodes that would be a gigabyte in each of their plugins.
func TestWatchesOwnNode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var mu sync.Mutex
	watched, other := 0, map[string]bool{}
	r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
		query := request.URL.Query()
		_, name, _ := strings.Cut(request.URL.Path, "/resourceslices/")
		single := name != "" || request.URL.Path == "/version" || strings.Contains(request.URL.Path, "/nodes/") || strings.Contains(request.URL.Path, "/resourceclaims/")
		if request.Method != http.MethodGet || single {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		if selector := query.Get("fieldSelector"); strings.Contains(selector, "spec.nodeName="+testNode) || selector == "metadata.name="+testNode {
			watched++
		} else {
			other[request.URL.String()] = true
		}
		return nil
	})
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.policy.set(onlyWhole(), nil)
	r.untilTainted(t, partitionsTainted("withdrawn"))
	mu.Lock()
	defer mu.Unlock()
	if watched == 0 || len(other) > 0 {
		t.Errorf("%d lists and watches of the own node, and of others: %v", watched, other)
	}
}

// TestRequestsOfAStart: what a plugin asks of the API server when it starts, with no slices yet and
// when all of them are there. In a large cluster a thousand start at a time.
func TestRequestsOfAStart(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	start := func() *rig {
		r := newRigOn(t, api)
		// A kubelet that registers the plugin has it list its slices once more.
		r.unregistered = true
		r.options.PollInterval = time.Hour
		r.start(t)
		return r
	}
	var mu sync.Mutex
	requests := map[string]int{}
	api.Refuse(func(request *http.Request) *apierrors.StatusError {
		what, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(request.URL.Path, "/apis/resource.k8s.io/v1"), "/api/v1"), "/"+testNode)
		what = request.Method + " " + what
		query := request.URL.Query()
		switch {
		case query.Has("watch"):
			what = "watch"
		case query.Has("dryRun"):
			what = "dry run"
		case strings.Contains(request.Header.Get("Accept"), "as=PartialObjectMetadata") && query.Has("fieldSelector"):
			what = "list of metadata"
		}
		mu.Lock()
		defer mu.Unlock()
		requests[what]++
		return nil
	})
	wantRequests := func(r *rig, when string, want map[string]int) {
		t.Helper()
		r.until(t, when, func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			if diff := cmp.Diff(want, requests); diff != "" {
				return fmt.Errorf("requests (-want +got):\n%s", diff)
			}
			return nil
		})
		mu.Lock()
		defer mu.Unlock()
		clear(requests)
	}
	first := start()
	wantRequests(first, "the first start", map[string]int{
		"GET /nodes": 1, "GET /resourceslices": 1, "list of metadata": 1, "watch": 2, "GET /version": 1, "dry run": 1, "POST /resourceslices": 2,
	})
	first.stop()
	if err := first.wait(t); err != nil {
		t.Fatal(err)
	}
	wantRequests(start(), "a restart", map[string]int{
		"GET /nodes": 1, "GET /resourceslices": 1, "list of metadata": 1, "watch": 2, "GET /version": 1, "dry run": 1,
	})
}

// TestNodeIsReadAgain: slices wait until the node was read, also where that failed when the plugin started.
func TestNodeIsReadAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var reads atomic.Int32
	r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
		if request.URL.Path == "/api/v1/nodes" && reads.Add(1) == 1 {
			return apierrors.NewTooManyRequests("busy", 0)
		}
		return nil
	})
	r.start(t)
	r.untilPublished(t, 4, 1)
	if owners := r.api.Slices()[0].OwnerReferences; len(owners) != 1 || owners[0].UID == "" {
		t.Errorf("owners %v", owners)
	}
}
