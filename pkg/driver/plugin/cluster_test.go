// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// refuse answers as the API server does.
func refuse(w http.ResponseWriter, err *apierrors.StatusError) {
	status := err.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status)
}

func clusterAt(t *testing.T, url string) *Cluster {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: url, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	return NewCluster(client)
}

func TestClaim(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	stored := api.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", UID: "uid-1"},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: allocated}},
	})
	for name, test := range map[string]struct {
		ref  claim.Ref
		want *resourceapi.ResourceClaim
	}{
		"it exists":    {claim.Ref{Namespace: "default", Name: "one", UID: "uid-1"}, stored},
		"another one":  {claim.Ref{Namespace: "default", Name: "one", UID: "uid-0"}, nil},
		"no such name": {claim.Ref{Namespace: "default", Name: "two", UID: "uid-1"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := clusterAt(t, api.URL())
			// The answer does not depend on what was asked before.
			for range 2 {
				got, err := cluster.Claim(t.Context(), test.ref)
				if diff := cmp.Diff(test.want, got, cmpopts.IgnoreTypes(metav1.TypeMeta{})); err != nil || diff != "" {
					t.Errorf("%v, claim (-want +got):\n%s", err, diff)
				}
			}
		})
	}
	if _, err := clusterAt(t, api.URL()).Claim(t.Context(), claim.Ref{UID: "uid-1"}); err == nil || !strings.Contains(err.Error(), "uid-1") {
		t.Errorf("a claim without a name: got error %v", err)
	}
}

var allocated = resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
	{Request: "r", Driver: testDriver, Pool: testNode, Device: "gpu-0000-1b-00-0", ShareID: ptr.To(types.UID("share-1"))},
}}

// TestClaimFromCache: the API server's cache is behind. What it still has is
// believed, what it has not yet is asked for.
func TestClaimFromCache(t *testing.T) {
	t.Parallel()
	object := func(uid types.UID, allocation *resourceapi.AllocationResult) *resourceapi.ResourceClaim {
		return &resourceapi.ResourceClaim{
			TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", UID: uid},
			Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
		}
	}
	some := &resourceapi.AllocationResult{Devices: allocated}
	now := object("uid-1", some)
	for name, test := range map[string]struct {
		cached   *resourceapi.ResourceClaim
		requests int
	}{
		"allocated":         {now, 1},
		"not allocated yet": {object("uid-1", nil), 2},
		"another claim":     {object("uid-0", some), 2},
		"not there yet":     {nil, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requests := 0
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests++
				answer := now
				if r.URL.Query().Get("resourceVersion") == "0" {
					answer = test.cached
				}
				if answer == nil {
					refuse(w, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "one"))
					return
				}
				w.Header().Set("Content-Type", "application/json")
				_ = json.NewEncoder(w).Encode(answer)
			}))
			defer server.Close()
			got, err := clusterAt(t, server.URL).Claim(t.Context(), claim.Ref{Namespace: "default", Name: "one", UID: "uid-1"})
			if diff := cmp.Diff(now, got, cmpopts.IgnoreTypes(metav1.TypeMeta{})); err != nil || diff != "" {
				t.Errorf("%v, claim (-want +got):\n%s", err, diff)
			}
			if requests != test.requests {
				t.Errorf("%d requests, want %d", requests, test.requests)
			}
		})
	}
}

// TestClaimIsNotKnown: nothing but the API server's own word makes a claim gone.
func TestClaimIsNotKnown(t *testing.T) {
	t.Parallel()
	ref := claim.Ref{Namespace: "default", Name: "one", UID: "uid-1"}
	status := func(err *apierrors.StatusError) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { refuse(w, err) }
	}
	for name, answer := range map[string]http.HandlerFunc{
		"forbidden":      status(apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "one", errors.New("no"))),
		"unauthorized":   status(apierrors.NewUnauthorized("who are you")),
		"broken":         status(apierrors.NewInternalError(errors.New("etcd is away"))),
		"a proxy's 404":  http.NotFound,
		"a proxy's page": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>welcome</html>")) },
		"away":           nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Nobody listens there. Another test may get the port of a server that has ended.
			url := "http://127.0.0.1:1"
			if answer != nil {
				server := httptest.NewServer(answer)
				defer server.Close()
				url = server.URL
			}
			if _, err := clusterAt(t, url).Claim(t.Context(), ref); err == nil || !strings.Contains(err.Error(), "default/one") {
				t.Errorf("got error %v", err)
			}
		})
	}
}

// TestBackgroundConfig: whatever asks for claims again and again, or writes events, takes
// nothing from the budget of pods that start.
func TestBackgroundConfig(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	stored := api.SetClaim(&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", UID: "uid-1"}})
	main := &rest.Config{Host: api.URL(), QPS: 50, Burst: 100, UserAgent: "gpu-kubelet-plugin/v1"}
	background := BackgroundConfig(main)
	if background.QPS != 2 || background.Burst != 10 || background.UserAgent == main.UserAgent {
		t.Errorf("got %v requests per second, bursts of %d, %q", background.QPS, background.Burst, background.UserAgent)
	}
	// Here there is a burst only, so that what comes after it waits for ever.
	main.QPS = 1e-9
	background = BackgroundConfig(main)
	client, err := kubernetes.NewForConfig(main)
	if err != nil {
		t.Fatal(err)
	}
	slow, err := kubernetes.NewForConfig(background)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var asking sync.WaitGroup
	var answered atomic.Int32
	for range 800 {
		asking.Go(func() {
			ref := claim.Ref{Namespace: stored.Namespace, Name: stored.Name, UID: stored.UID}
			if _, err := NewCluster(slow).Claim(ctx, ref); err == nil {
				answered.Add(1)
			}
		})
	}
	if _, err := client.ResourceV1().ResourceClaims(stored.Namespace).Get(t.Context(), stored.Name, metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	cancel()
	asking.Wait()
	// Each asks twice, as the claim is not allocated.
	if got := int(answered.Load()); got > background.Burst/2 {
		t.Errorf("%d answers, the budget allows %d", got, background.Burst/2)
	}
}
