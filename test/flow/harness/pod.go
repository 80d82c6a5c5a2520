// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podsv1alpha1 "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/gpusim/cgroup"
	"github.com/partage-dev/partage/test/must"
)

// InPod moves the program into the cgroup of a pod.
func (u *Program) InPod(t testing.TB, uid types.UID) {
	t.Helper()
	cgroup.InPod(t, u.PID(), string(uid))
	t.Cleanup(u.Kill) // before it would be moved out
}

// PodsAPI is the kubelet's, of a node with pods of which nothing is known but their end.
type PodsAPI struct {
	podsv1alpha1.UnimplementedPodsServer

	// Flag tells the supervisor of it.
	Flag   string
	events chan *podsv1alpha1.WatchPodsEvent
}

// StartPodsAPI serves the kubelet's Pods API until the test ends.
func (n *Node) StartPodsAPI(t testing.TB) *PodsAPI {
	t.Helper()
	socket := filepath.Join(filepath.Dir(n.Root), "pods-api.sock")
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "unix", socket))(t)
	api := &PodsAPI{Flag: "--kubelet-pods-socket=" + socket, events: make(chan *podsv1alpha1.WatchPodsEvent)}
	server := grpc.NewServer()
	podsv1alpha1.RegisterPodsServer(server, api)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return api
}

// WatchPods implements the API for one client.
func (a *PodsAPI) WatchPods(_ *podsv1alpha1.WatchPodsRequest, stream grpc.ServerStreamingServer[podsv1alpha1.WatchPodsEvent]) error {
	err := stream.Send(&podsv1alpha1.WatchPodsEvent{Type: podsv1alpha1.EventType_INITIAL_SYNC_COMPLETE})
	for err == nil {
		select {
		case event := <-a.events:
			err = stream.Send(event)
		case <-stream.Context().Done():
			return nil
		}
	}
	return err
}

// Delete says that a pod is going to be killed after a grace period of some seconds.
func (a *PodsAPI) Delete(t testing.TB, uid types.UID, grace int64) {
	t.Helper()
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: "ending", UID: uid,
		DeletionTimestamp:          ptr.To(metav1.NewTime(time.Now().Add(time.Duration(grace) * time.Second))),
		DeletionGracePeriodSeconds: &grace,
	}}
	data := must.Get(pod.Marshal())(t)
	select {
	case a.events <- &podsv1alpha1.WatchPodsEvent{Type: podsv1alpha1.EventType_MODIFIED, Pod: data}:
	case <-t.Context().Done():
		t.Fatal("nobody watches the pods")
	}
}
