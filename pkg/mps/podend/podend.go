// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package podend tells when the pods of a node are going to be killed. It asks the kubelet
// through its Pods API (KEP-4188; on by default from Kubernetes 1.37), a socket for root on
// the node, so that no rights in the cluster are needed, and nothing is asked of the API
// server.
//
// A pod that is deleted gets its stop signal at once and SIGKILL after its grace period. The
// kubelet counts that period from when it learns of the deletion, and so does this package,
// whose clock is the same. Restarts of single containers, evictions and a node's lack of
// memory are not announced.
package podend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	podsv1alpha1 "k8s.io/kubelet/pkg/apis/pods/v1alpha1"

	"github.com/partage-dev/partage/pkg/util/logchange"
)

// End is the announced end of a pod.
type End struct {
	UID types.UID
	// Grace is how long its containers have, from the moment that the kubelet knew.
	Grace time.Duration
	// At is when what is left of it is killed.
	At time.Time
}

// Handler is told of ends. It must not block.
type Handler interface {
	// PodEnds is called when a pod is going to be killed, and again if that will be
	// earlier than was said.
	PodEnds(ctx context.Context, end End)
	// PodEnded is called when the kubelet knows the pod no more.
	PodEnded(uid types.UID)
}

// Watcher watches the pods of a node.
type Watcher struct {
	// Socket is the kubelet's.
	Socket string
	// Retry is how long the watcher waits before it connects again.
	Retry time.Duration

	now func() time.Time
}

// largestEvent is far more than the API server lets a pod have.
const largestEvent = 16 << 20

// longestGrace is a year, in seconds. The API server takes more than a time.Duration can
// be.
const longestGrace = 365 * 24 * 60 * 60

// Run watches until ctx ends. A kubelet that does not answer, or has no such API, is asked
// again later.
func (w Watcher) Run(ctx context.Context, handler Handler) {
	if w.now == nil {
		w.now = time.Now
	}
	var problem logchange.Problem
	for ctx.Err() == nil {
		err := w.watch(ctx, handler, func() {
			problem.Log(ctx, nil, "", "The kubelet tells when pods end")
		})
		if ctx.Err() != nil {
			return
		}
		problem.Log(ctx, explain(err), "The kubelet does not tell when pods end: their MPS clients are not terminated before they are killed", "")
		select {
		case <-ctx.Done():
		case <-time.After(w.Retry):
		}
	}
}

// explain adds what an admin can do.
func explain(err error) error {
	switch status.Code(err) {
	case codes.Unavailable:
		return fmt.Errorf("the kubelet is being restarted, or does not serve its Pods API, which is on by default from Kubernetes 1.37 (feature gate PodsAPI): %w", err)
	case codes.Unimplemented:
		return fmt.Errorf("the kubelet does not serve this version of its Pods API, v1alpha1; see whether there is a newer release of this driver: %w", err)
	}
	return err
}

// watch follows one stream to its end. connected is called when the kubelet has told of all
// its pods.
func (w Watcher) watch(ctx context.Context, handler Handler, connected func()) error {
	conn, err := grpc.NewClient("unix://"+w.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largestEvent)))
	if err != nil {
		return fmt.Errorf("connect to the kubelet: %w", err)
	}
	defer func() { _ = conn.Close() }()
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := podsv1alpha1.NewPodsClient(conn).WatchPods(limited, &podsv1alpha1.WatchPodsRequest{})
	if err != nil {
		return fmt.Errorf("watch the kubelet's pods: %w", err)
	}
	v := view{handler: handler, now: w.now, known: map[types.UID]time.Duration{}, initial: true}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("watch the kubelet's pods: the kubelet ended the stream")
		}
		if err != nil {
			return fmt.Errorf("watch the kubelet's pods: %w", err)
		}
		if event.GetType() == podsv1alpha1.EventType_INITIAL_SYNC_COMPLETE {
			v.initial = false
			connected()
			continue
		}
		// Of the pod, only its metadata is decoded.
		var pod metav1.PartialObjectMetadata
		if err := pod.Unmarshal(event.GetPod()); err != nil {
			klog.FromContext(ctx).Error(err, "The kubelet tells of a pod that cannot be decoded", "event", event.GetType())
			continue
		}
		v.see(ctx, event.GetType(), &pod.ObjectMeta)
	}
}

// view is what one stream has told.
type view struct {
	handler Handler
	now     func() time.Time
	// initial: these pods were there before, so that their grace period may run already.
	initial bool
	// known are the ends that were announced, by their grace period.
	known map[types.UID]time.Duration
}

func (v view) see(ctx context.Context, event podsv1alpha1.EventType, pod *metav1.ObjectMeta) {
	if event == podsv1alpha1.EventType_DELETED {
		delete(v.known, pod.UID)
		v.handler.PodEnded(pod.UID)
		return
	}
	if pod.DeletionTimestamp == nil || pod.DeletionGracePeriodSeconds == nil {
		return
	}
	grace := time.Duration(min(*pod.DeletionGracePeriodSeconds, longestGrace)) * time.Second
	if before, told := v.known[pod.UID]; told && before <= grace {
		return
	}
	v.known[pod.UID] = grace
	end := End{UID: pod.UID, Grace: grace, At: v.now().Add(grace)}
	if v.initial && pod.DeletionTimestamp.Time.Before(end.At) {
		end.At = pod.DeletionTimestamp.Time // by the clock of the API server
	}
	v.handler.PodEnds(ctx, end)
}
