// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podsv1alpha1 "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
	"k8s.io/utils/ptr"
)

// InPod moves the program into the cgroup of a pod.
func (u *Program) InPod(t testing.TB, uid types.UID) {
	t.Helper()
	pid := []byte(strconv.Itoa(u.cmd.Process.Pid))
	var errs []error
	// One hierarchy is enough. With version 2 there is only one.
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/freezer"} {
		if _, err := os.Stat(filepath.Join(at, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(at, "kubepods-*-pod"+strings.ReplaceAll(string(uid), "-", "_")+".slice")
		if err == nil {
			t.Cleanup(func() {
				u.Kill()
				// What was killed leaves the cgroup a little later. The test's own context has ended.
				if err := Eventually(context.WithoutCancel(t.Context()), func() error { return os.Remove(dir) }); err != nil {
					t.Error(err)
				}
			})
			err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), pid, 0)
		}
		if err == nil {
			return
		}
		errs = append(errs, err)
	}
	t.Skipf("no cgroup can be made here: %v", errors.Join(errs...))
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
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
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
	data, err := pod.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	select {
	case a.events <- &podsv1alpha1.WatchPodsEvent{Type: podsv1alpha1.EventType_MODIFIED, Pod: data}:
	case <-t.Context().Done():
		t.Fatal("nobody watches the pods")
	}
}
