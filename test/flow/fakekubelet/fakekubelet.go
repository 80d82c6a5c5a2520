// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fakekubelet plays the kubelet for those who ask which devices pods have.
package fakekubelet

import (
	"context"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/partage-dev/partage/test/must"
)

// PodResources serves the kubelet's PodResources API.
type PodResources struct {
	podresourcesapi.UnimplementedPodResourcesListerServer

	mu      sync.Mutex
	pods    []*podresourcesapi.PodResources
	failing bool
	asked   int
}

// Serve serves it on a socket until the test ends. It answers with no pods at first.
func Serve(t testing.TB, socket string) *PodResources {
	t.Helper()
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "unix", socket))(t)
	k := &PodResources{}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, k)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return k
}

// Set replaces the pods.
func (k *PodResources) Set(pods ...*podresourcesapi.PodResources) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = pods
}

// Fail says whether questions are answered with an error.
func (k *PodResources) Fail(failing bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.failing = failing
}

// Asked is how many questions there were.
func (k *PodResources) Asked() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asked
}

// List implements the API.
func (k *PodResources) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked++
	if k.failing {
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	return &podresourcesapi.ListPodResourcesResponse{PodResources: k.pods}, nil
}

// Device is one that a claim was allocated.
type Device struct{ Driver, Pool, Name string }

// Pod has one container with one claim. A pod without devices has no claim.
func Pod(namespace, name, claim string, devices ...Device) *podresourcesapi.PodResources {
	container := &podresourcesapi.ContainerResources{Name: "main"}
	if len(devices) > 0 {
		d := &podresourcesapi.DynamicResource{ClaimNamespace: namespace, ClaimName: claim}
		for _, one := range devices {
			d.ClaimResources = append(d.ClaimResources, &podresourcesapi.ClaimResource{DriverName: one.Driver, PoolName: one.Pool, DeviceName: one.Name})
		}
		container.DynamicResources = append(container.DynamicResources, d)
	}
	return &podresourcesapi.PodResources{Namespace: namespace, Name: name, Containers: []*podresourcesapi.ContainerResources{container}}
}
