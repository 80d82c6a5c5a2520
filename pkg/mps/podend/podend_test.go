// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package podend

import (
	"context"
	"math"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podsv1alpha1 "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// kubelet serves streams, each of which is what a function makes it.
type kubelet struct {
	podsv1alpha1.UnimplementedPodsServer

	streams chan func(send func(podsv1alpha1.EventType, *corev1.Pod)) error
}

func (k *kubelet) WatchPods(_ *podsv1alpha1.WatchPodsRequest, stream grpc.ServerStreamingServer[podsv1alpha1.WatchPodsEvent]) error {
	var play func(send func(podsv1alpha1.EventType, *corev1.Pod)) error
	select {
	case play = <-k.streams:
	case <-stream.Context().Done():
		return nil
	}
	return play(func(event podsv1alpha1.EventType, pod *corev1.Pod) {
		var data []byte
		if pod != nil {
			data, _ = pod.Marshal()
		}
		_ = stream.Send(&podsv1alpha1.WatchPodsEvent{Type: event, Pod: data})
	})
}

// heard passes on what the watcher tells.
type heard struct {
	ends  chan End
	ended chan types.UID
}

func (h heard) PodEnds(_ context.Context, end End) { h.ends <- end }
func (h heard) PodEnded(uid types.UID)             { h.ended <- uid }

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func start(t *testing.T) (*kubelet, heard) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "pods-api")
	k := &kubelet{streams: make(chan func(func(podsv1alpha1.EventType, *corev1.Pod)) error)}
	h := heard{ends: make(chan End), ended: make(chan types.UID)}
	watcher := Watcher{Socket: socket, Retry: time.Millisecond, now: func() time.Time { return now }}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		watcher.Run(ctx, h) // the kubelet does not listen yet
	}()
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "unix", socket))(t)
	server := grpc.NewServer()
	podsv1alpha1.RegisterPodsServer(server, k)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() {
		cancel()
		<-done
		server.Stop()
	})
	return k, h
}

// pod is one that is deleted at a time and with a grace period, or not at all.
func pod(name string, deleted time.Time, grace int64) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "c"}}},
	}
	if !deleted.IsZero() {
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = ptr.To(metav1.NewTime(deleted.Add(time.Duration(grace)*time.Second))), ptr.To(grace)
	}
	return p
}

func want(t *testing.T, h heard, name string, grace, left time.Duration) {
	t.Helper()
	end := End{UID: types.UID("uid-" + name), Grace: grace, At: now.Add(left)}
	expect.Same(t, <-h.ends, end)
}

// TestWatch: a pod's end counts from when the kubelet tells of it, and is told once, unless
// it comes earlier than was said. A new connection starts over.
func TestWatch(t *testing.T) {
	k, h := start(t)
	goOn := make(chan struct{})
	k.streams <- func(send func(podsv1alpha1.EventType, *corev1.Pod)) error {
		send(podsv1alpha1.EventType_ADDED, pod("runs", time.Time{}, 0))
		send(podsv1alpha1.EventType_ADDED, pod("ends already", now.Add(-20*time.Second), 30))
		send(podsv1alpha1.EventType_INITIAL_SYNC_COMPLETE, nil)
		// The clock of the API server is an hour ahead.
		send(podsv1alpha1.EventType_MODIFIED, pod("runs", now.Add(time.Hour), 30))
		send(podsv1alpha1.EventType_MODIFIED, pod("runs", now.Add(time.Hour), 30))
		send(podsv1alpha1.EventType_MODIFIED, pod("runs", now.Add(time.Hour), 1))
		send(podsv1alpha1.EventType_DELETED, pod("runs", time.Time{}, 0))
		<-goOn
		return status.Error(codes.Unavailable, "the kubelet restarts")
	}
	want(t, h, "ends already", 30*time.Second, 10*time.Second)
	want(t, h, "runs", 30*time.Second, 30*time.Second)
	want(t, h, "runs", time.Second, time.Second)
	if uid := <-h.ended; uid != "uid-runs" {
		t.Errorf("%s has ended", uid)
	}
	close(goOn)
	k.streams <- func(send func(podsv1alpha1.EventType, *corev1.Pod)) error {
		send(podsv1alpha1.EventType_ADDED, pod("ends already", now.Add(-25*time.Second), 30))
		return nil
	}
	want(t, h, "ends already", 30*time.Second, 5*time.Second)
}

// TestLongestGrace: the API server takes any number of seconds.
func TestLongestGrace(t *testing.T) {
	k, h := start(t)
	k.streams <- func(send func(podsv1alpha1.EventType, *corev1.Pod)) error {
		send(podsv1alpha1.EventType_INITIAL_SYNC_COMPLETE, nil)
		for name, grace := range map[string]int64{"longest": math.MaxInt64, "long": 1 << 34} {
			p := pod(name, now, 0)
			p.DeletionGracePeriodSeconds = &grace
			send(podsv1alpha1.EventType_MODIFIED, p)
		}
		return nil
	}
	for range 2 {
		if end := <-h.ends; end.Grace < 24*time.Hour || end.At.Before(now.Add(24*time.Hour)) {
			t.Errorf("got %+v", end)
		}
	}
}
