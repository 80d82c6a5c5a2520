// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package metawatch watches objects, of which metadata is often enough.
//
// Each watch begins with a list, of some kilobytes. A watch from a version that a restored etcd has not reached yet brings
// nothing, not even an error, which is why no watch is continued where the one before has ended.
package metawatch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/util/logchange"
)

const (
	// watchTime is how long a watch lasts at least where nothing is wrong, and watchJitter how much longer at most. The API server
	// is asked to end it then. If it does not within watchGrace, it or something on the way to it hangs.
	watchTime, watchJitter, watchGrace = 5 * time.Minute, 5 * time.Minute, 30 * time.Second
	// soundWatch is how long a watch lasts at least where nothing is wrong. After a shorter one there is a pause, up to failedPause
	// where it could not begin.
	soundWatch                                = 10 * time.Second
	minWatchPause, failedPause, maxWatchPause = 2 * time.Second, 30 * time.Second, 5 * time.Minute
	// listTimeout bounds a list. An API server may be slow, but not for ever.
	listTimeout = 30 * time.Second
)

// Watch is of some objects, with lists of the type L. All fields are mandatory.
type Watch[L interface {
	runtime.Object
	metav1.ListInterface
}] struct {
	Client interface {
		List(ctx context.Context, o metav1.ListOptions) (L, error)
		Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	}
	// What is watched, in a word for errors.
	What string
	// Selector is a field selector.
	Selector string
	// Changed is called with all objects at the beginning of each watch, and after one was created, changed or deleted.
	Changed func(objects map[types.UID]metav1.Object)

	problem logchange.Problem
}

// Run watches until ctx ends.
func (w *Watch[L]) Run(ctx context.Context) {
	for pause := time.Duration(0); ctx.Err() == nil; {
		began := time.Now()
		err := w.follow(ctx)
		lasted := time.Since(began)
		klog.FromContext(ctx).V(4).Info("A watch has ended", "of", w.What, "lasted", lasted, "err", err)
		switch pause = max(minWatchPause, 2*pause); {
		case lasted >= soundWatch:
			pause = 0
		case err != nil:
			pause = min(pause, failedPause)
		default:
			pause = min(pause, maxWatchPause)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait.Jitter(pause, 0.5)):
		}
	}
}

// follow lists the objects and watches them until the watch ends.
func (w *Watch[L]) follow(ctx context.Context) error {
	limited, end := context.WithTimeout(ctx, listTimeout)
	list, err := w.Client.List(limited, metav1.ListOptions{FieldSelector: w.Selector})
	end()
	if ctx.Err() == nil {
		w.problem.Log(ctx, err, "What the API server has is not known, or as it was: "+w.What, "It is known again what the API server has: "+w.What)
	}
	if err != nil {
		return fmt.Errorf("list %s: %w", w.What, err)
	}
	objects := map[types.UID]metav1.Object{}
	_ = meta.EachListItem(list, func(item runtime.Object) error {
		if object, is := item.(metav1.Object); is { // as all are
			objects[object.GetUID()] = object
		}
		return nil
	})
	w.Changed(objects)
	lasts := watchTime + rand.N(watchJitter) //nolint:gosec // no secret
	ctx, cancel := context.WithTimeout(ctx, lasts+watchGrace)
	defer cancel()
	events, err := w.Client.Watch(ctx, metav1.ListOptions{
		FieldSelector: w.Selector, ResourceVersion: list.GetResourceVersion(), TimeoutSeconds: ptr.To(int64(lasts / time.Second)),
	})
	if err != nil {
		return fmt.Errorf("watch %s: %w", w.What, err)
	}
	defer events.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, open := <-events.ResultChan():
			if !open || e.Type == watch.Error {
				return nil
			}
			if object, is := e.Object.(metav1.Object); is {
				objects[object.GetUID()] = object
				if e.Type == watch.Deleted {
					delete(objects, object.GetUID())
				}
				w.Changed(objects)
			}
		}
	}
}
