// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestKindOf(t *testing.T) {
	for _, c := range []struct{ method, url, want string }{
		{"GET", "/version", "get /version"},
		{"GET", "/api", "get /api"},
		{"GET", "/api/v1/nodes", "list nodes"},
		{"GET", "/api/v1/nodes/gpu-1", "get nodes"},
		{"POST", "/api/v1/namespaces", "create namespaces"},
		{"POST", "/api/v1/namespaces/default/events", "create events"},
		{"PATCH", "/api/v1/namespaces/default/events/e?fieldManager=x", "patch events"},
		{"GET", "/apis/resource.k8s.io/v1/resourceslices?limit=1", "list resourceslices"},
		{"GET", "/apis/resource.k8s.io/v1/resourceslices?watch=true", "watch resourceslices"},
		{"GET", "/apis/resource.k8s.io/v1/resourceslices?watch=1", "watch resourceslices"},
		{"PUT", "/apis/resource.k8s.io/v1/resourceslices/a", "update resourceslices"},
		{"POST", "/apis/resource.k8s.io/v1/resourceslices?dryRun=All", "try to create resourceslices"},
		{"DELETE", "/apis/resource.k8s.io/v1/resourceslices/a", "delete resourceslices"},
		{"GET", "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/c", "get resourceclaims"},
	} {
		if got := kindOf(httptest.NewRequest(c.method, c.url, http.NoBody)); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.method, c.url, got, c.want)
		}
	}
}

// TestTraffic counts requests of a real client.
func TestTraffic(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/taken") {
			w.WriteHeader(http.StatusConflict)
		}
		_, _ = io.WriteString(w, strings.Repeat("x", 5000))
	}))
	defer server.Close()
	traffic := NewTraffic()
	client := &http.Client{Transport: traffic.Transport(&http.Transport{DialContext: traffic.Dial})}
	defer client.CloseIdleConnections()
	ask := func(method, path string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, server.URL+path, strings.NewReader(strings.Repeat("y", 3000)))
		if err != nil {
			t.Fatal(err)
		}
		if response, err := client.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
		}
	}
	const slices = "/apis/resource.k8s.io/v1/resourceslices"
	ask(http.MethodPost, slices)
	before := traffic.Counts()
	traffic.Restart()
	began := time.Now()
	ask(http.MethodPut, slices+"/a")
	ask(http.MethodPut, slices+"/b")
	ask(http.MethodPut, slices+"/taken")
	last := traffic.Counts().Last
	ask(http.MethodGet, "/version")
	ask(http.MethodGet, slices+"?watch=true")
	got := traffic.Counts().Since(before)
	if want := map[string]int{"update resourceslices": 2, "get /version": 1, "watch resourceslices": 1}; !reflect.DeepEqual(got.Answered, want) {
		t.Errorf("answered %v, want %v", got.Answered, want)
	}
	if want := map[string]int{"update resourceslices: 409": 1}; !reflect.DeepEqual(got.Refused, want) {
		t.Errorf("refused %v, want %v", got.Refused, want)
	}
	if got.Requests() != 5 || got.Peak < 1 || got.Peak > 5 {
		t.Errorf("%d requests, at most %d in a second; want 5", got.Requests(), got.Peak)
	}
	if got.Sent < 15000 || got.Sent > 20000 || got.Received < 25000 || got.Received > 30000 {
		t.Errorf("%d bytes sent and %d received, want a little more than 15000 and 25000", got.Sent, got.Received)
	}
	if last.Before(began) || !got.Last.Equal(last) {
		t.Errorf("slices were last asked about at %s, then %s; began at %s", last, got.Last, began)
	}
	server.Close()
	ask(http.MethodGet, "/version")
	if refused := traffic.Counts().Refused["get /version: no answer"]; refused != 1 {
		t.Errorf("%d requests without an answer, want 1", refused)
	}
}
