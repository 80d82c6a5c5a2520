// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	resourcev1beta1 "k8s.io/api/resource/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/test/flow/fakeapi"
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

func TestClaimExists(t *testing.T) {
	t.Parallel()
	api := fakeapi.New(t)
	api.SetClaim(&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", UID: "uid-1"}})
	for name, test := range map[string]struct {
		ref  claim.Ref
		want bool
	}{
		"it does":      {claim.Ref{Namespace: "default", Name: "one", UID: "uid-1"}, true},
		"another one":  {claim.Ref{Namespace: "default", Name: "one", UID: "uid-0"}, false},
		"no such name": {claim.Ref{Namespace: "default", Name: "two", UID: "uid-1"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := clusterAt(t, api.URL())
			// The answer does not depend on what was asked before.
			for range 2 {
				got, err := cluster.Exists(t.Context(), test.ref)
				if err != nil || got != test.want {
					t.Errorf("got %v, %v, want %v", got, err, test.want)
				}
			}
		})
	}
	if _, err := clusterAt(t, api.URL()).Exists(t.Context(), claim.Ref{UID: "uid-1"}); err == nil {
		t.Error("a claim without a name is known")
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
			server := httptest.NewServer(answer)
			defer server.Close()
			if answer == nil {
				server.Close()
			}
			if _, err := clusterAt(t, server.URL).Exists(t.Context(), ref); err == nil || !strings.Contains(err.Error(), "default/one") {
				t.Errorf("got error %v", err)
			}
		})
	}
}

// TestOlderCluster: one that serves an older version of the API only.
func TestOlderCluster(t *testing.T) {
	t.Parallel()
	const path = "/apis/resource.k8s.io/v1beta1/namespaces/default/resourceclaims/"
	var other int
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == path+"one":
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(&resourcev1beta1.ResourceClaim{
				TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1beta1", Kind: "ResourceClaim"},
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", UID: "uid-1"},
			})
		case strings.HasPrefix(r.URL.Path, path):
			refuse(w, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "two"))
		default:
			other++
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	cluster := clusterAt(t, server.URL)
	for ref, want := range map[claim.Ref]bool{
		{Namespace: "default", Name: "one", UID: "uid-1"}: true,
		{Namespace: "default", Name: "one", UID: "uid-0"}: false,
		{Namespace: "default", Name: "two", UID: "uid-2"}: false,
	} {
		if got, err := cluster.Exists(t.Context(), ref); err != nil || got != want {
			t.Errorf("%s: got %v, %v, want %v", ref, got, err, want)
		}
	}
	if other != 2 {
		t.Errorf("%d requests for versions that are not served, want one for each", other)
	}
}
