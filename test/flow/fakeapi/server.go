// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fakeapi is a small Kubernetes API server for tests: it stores nodes,
// ResourceClaims, ResourceSlices and events in memory and speaks as much REST as a DRA
// driver needs, watch, dry run, server-side apply of the status of claims and disabled feature gates
// included. It checks little that it stores.
package fakeapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/version"

	"github.com/partage-dev/partage/test/must"
)

// Server is the API server. It ends with the test that made it.
type Server struct {
	http    *httptest.Server
	handler http.Handler
	// requests are those that Transport brought and that have not ended.
	requests sync.WaitGroup

	mu      sync.Mutex
	version int64
	nodes   map[string]*corev1.Node
	claims  map[types.NamespacedName]*resourceapi.ResourceClaim
	slices  map[string]*resourceapi.ResourceSlice
	events  []event
	// changed is closed and replaced whenever events grows.
	changed chan struct{}
	// restored is closed and replaced when etcd is restored.
	restored chan struct{}
	// reported are the events that people read.
	reported []corev1.Event
	refuse   func(*http.Request) *apierrors.StatusError
	// dropCounters behaves as if DRAPartitionableDevices were off.
	dropCounters bool
	// dropShares behaves as if DRAConsumableCapacity were off.
	dropShares bool
	// dropTaints behaves as if DRADeviceTaints were off.
	dropTaints bool
	// dropDeviceStatus behaves as if DRAResourceClaimDeviceStatus were off.
	dropDeviceStatus bool
	// statusWrites are how often each field manager has written the status of a claim.
	statusWrites map[string]int
	kubernetes   string
}

// New starts a server that has no objects.
func New(t testing.TB) *Server {
	t.Helper()
	s := newServer()
	s.http = httptest.NewServer(s.handler)
	t.Cleanup(func() {
		s.http.CloseClientConnections()
		s.http.Close()
	})
	return s
}

// NewWithoutNetwork makes a server that only Transport reaches. The test ends when
// every request has: also those whose client no longer waits, which a server goes on
// with.
func NewWithoutNetwork(t testing.TB) *Server {
	t.Helper()
	s := newServer()
	t.Cleanup(s.requests.Wait)
	return s
}

func newServer() *Server {
	s := &Server{
		nodes:    map[string]*corev1.Node{},
		claims:   map[types.NamespacedName]*resourceapi.ResourceClaim{},
		slices:   map[string]*resourceapi.ResourceSlice{},
		changed:  make(chan struct{}),
		restored: make(chan struct{}),

		statusWrites: map[string]int{},

		kubernetes: "v1.37.2",
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /version", s.getVersion)
	mux.HandleFunc("GET /api/v1/nodes", s.listOrWatchNodes)
	mux.HandleFunc("GET /api/v1/nodes/{name}", s.getNode)
	mux.HandleFunc("PATCH /api/v1/nodes/{name}", s.patchNode)
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}", s.getClaim)
	mux.HandleFunc("PATCH /apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status", s.patchClaimStatus)
	mux.HandleFunc("POST /api/v1/namespaces/{namespace}/events", s.createEvent)
	mux.HandleFunc("PATCH /api/v1/namespaces/{namespace}/events/{name}", s.patchEvent)
	const slices = "/apis/resource.k8s.io/v1/resourceslices"
	mux.HandleFunc("GET "+slices, s.listOrWatchSlices)
	mux.HandleFunc("POST "+slices, s.createSlice)
	mux.HandleFunc("PUT "+slices+"/{name}", s.updateSlice)
	mux.HandleFunc("DELETE "+slices+"/{name}", s.deleteSlice)
	s.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.refused(r); err != nil {
			respondError(w, err)
			return
		}
		mux.ServeHTTP(w, r)
	})
	return s
}

// URL is where the server listens, without TLS.
func (s *Server) URL() string { return s.http.URL }

// Kubeconfig writes a kubeconfig for this server into dir and returns its path.
func (s *Server) Kubeconfig(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "kubeconfig")
	content := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
users: [{name: test, user: {}}]
`, s.URL())
	must.Do(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// SetKubernetes sets the version that the server says it has.
func (s *Server) SetKubernetes(gitVersion string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kubernetes = gitVersion
}

func (s *Server) getVersion(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	respond(w, http.StatusOK, version.Info{GitVersion: s.kubernetes})
}

// SetClaim makes or replaces a claim; a claim without UID gets one. It returns
// what is stored.
func (s *Server) SetClaim(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	s.mu.Lock()
	defer s.mu.Unlock()
	claim = claim.DeepCopy()
	claim.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"}
	if claim.UID == "" {
		claim.UID = uuid.NewUUID()
	}
	claim.ResourceVersion = s.nextVersion()
	s.claims[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}] = claim
	return claim.DeepCopy()
}

// Reserve lets a pod use a claim that is there.
func (s *Server) Reserve(namespace, name, pod string) {
	s.ReserveFor(namespace, name, pod, types.UID("uid-of-"+pod))
}

// ReserveFor is Reserve for a pod with a UID of the caller's.
func (s *Server) ReserveFor(namespace, name, pod string, uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	claim := s.claims[types.NamespacedName{Namespace: namespace, Name: name}].DeepCopy()
	claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
		Resource: "pods", Name: pod, UID: uid,
	})
	claim.ResourceVersion = s.nextVersion()
	s.claims[types.NamespacedName{Namespace: namespace, Name: name}] = claim
}

// DeleteClaim removes a claim. SetClaim may make another one with the same name
// afterwards, which gets another UID unless it brings one.
func (s *Server) DeleteClaim(namespace, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.claims, types.NamespacedName{Namespace: namespace, Name: name})
}

// DropCounters makes the server behave as with the feature gate
// DRAPartitionableDevices off: it stores slices without their counters.
func (s *Server) DropCounters(drop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropCounters = drop
}

// DropShares makes the server behave as with the feature gate
// DRAConsumableCapacity off: it stores devices without what lets several claims
// have one.
func (s *Server) DropShares(drop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropShares = drop
}

// DropTaints makes the server behave as with the feature gate DRADeviceTaints off.
func (s *Server) DropTaints(drop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropTaints = drop
}

// Refuse makes requests fail for which refuse returns an error. Nil ends that.
func (s *Server) Refuse(refuse func(*http.Request) *apierrors.StatusError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = refuse
}

func (s *Server) refused(r *http.Request) *apierrors.StatusError {
	s.mu.Lock()
	refuse := s.refuse
	s.mu.Unlock()
	if refuse == nil {
		return nil
	}
	return refuse(r)
}

// nextVersion needs the lock.
func (s *Server) nextVersion() string {
	s.version++
	return strconv.FormatInt(s.version, 10)
}

func (s *Server) getClaim(w http.ResponseWriter, r *http.Request) {
	key := types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}
	s.mu.Lock()
	claim, ok := s.claims[key]
	s.mu.Unlock()
	if !ok {
		respondError(w, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), key.Name))
		return
	}
	respond(w, http.StatusOK, claim)
}

func respond(w http.ResponseWriter, code int, object any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// An error here is a client that went away.
	_ = json.NewEncoder(w).Encode(object)
}

func respondError(w http.ResponseWriter, err *apierrors.StatusError) {
	status := err.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	if status.Details != nil && status.Details.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(status.Details.RetryAfterSeconds)))
	}
	respond(w, int(status.Code), status)
}

func sliceResource() schema.GroupResource { return resourceapi.Resource("resourceslices") }
