// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// eventStore writes events to the API server, once.
type eventStore struct{ client kubernetes.Interface }

// writtenEvent is an event as it was written last. The zero value was not.
type writtenEvent struct {
	count int32
	at    time.Time
}

// write makes an event that was observed some times since it was written last, or updates
// the one that is there: the message may have other process IDs, and an update makes the
// API server keep it for longer.
func (s *eventStore) write(ctx context.Context, event *corev1.Event, times int32, last writtenEvent) (writtenEvent, error) {
	var stored *corev1.Event
	err := error(apierrors.NewNotFound(corev1.Resource("events"), event.Name))
	if last.count > 0 {
		stored, err = s.update(ctx, event, last.count+times)
	}
	if apierrors.IsNotFound(err) {
		created := event.DeepCopy()
		created.Count = times
		stored, err = s.client.CoreV1().Events(event.Namespace).Create(ctx, created, metav1.CreateOptions{})
	}
	if apierrors.IsAlreadyExists(err) {
		// An earlier plugin has reported it, or the other one during an upgrade.
		stored, err = s.update(ctx, event, 0)
	}
	if err != nil {
		return last, err
	}
	return writtenEvent{count: stored.Count, at: time.Now()}, nil
}

// update leaves the count as it is if it is 0.
func (s *eventStore) update(ctx context.Context, event *corev1.Event, count int32) (*corev1.Event, error) {
	patch, err := json.Marshal(struct {
		Count         int32       `json:"count,omitempty"`
		LastTimestamp metav1.Time `json:"lastTimestamp"`
		Message       string      `json:"message"`
	}{count, event.LastTimestamp, event.Message})
	if err != nil {
		return nil, fmt.Errorf("update event %s: %w", event.Name, err)
	}
	return s.client.CoreV1().Events(event.Namespace).Patch(ctx, event.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
}

// isFinal reports whether the API server will answer the same again.
func isFinal(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && !apierrors.IsTooManyRequests(err) && !notServed(err)
}
