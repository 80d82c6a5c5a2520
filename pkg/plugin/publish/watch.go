// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

var (
	sliceResource = resourceapi.SchemeGroupVersion.WithResource("resourceslices")
	nodeResource  = corev1.SchemeGroupVersion.WithResource("nodes")
)

// watcher learns which slices of this node exist in which version. Their content is
// read only when somebody else has changed them: when an API server restarts, all
// plugins of a cluster list their slices again.
//
// Each watch begins with a list of metadata, of some kilobytes. A watch from a version
// that a restored etcd has not reached yet brings nothing, not even an error, which is
// why no watch is continued where the one before has ended.
type watcher struct {
	client   metadata.Interface
	selector string
	// changed is called after every event and list.
	changed func()

	mu sync.Mutex
	// listing has the versions of the last list, which began at a time; nil once it was compared.
	listing map[types.UID]string
	listed  time.Time
	// events are the last ones since then.
	events map[types.UID]event
}

// event is the last one of a slice.
type event struct {
	version string
	deleted bool
}

const (
	// watchTime is how long a watch lasts at least where nothing is wrong, and watchJitter how much longer at most. The API server
	// is asked to end it then. If it does not within watchGrace, it or something on the way to it hangs.
	watchTime, watchJitter, watchGrace = 5 * time.Minute, 5 * time.Minute, 30 * time.Second
	// soundWatch is how long a watch lasts at least where nothing is wrong. After a shorter one there is a pause, up to failedPause
	// where it could not begin.
	soundWatch                                = 10 * time.Second
	minWatchPause, failedPause, maxWatchPause = 2 * time.Second, 30 * time.Second, 5 * time.Minute
)

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) {
	pause := time.Duration(0)
	for {
		began := time.Now()
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		lasted := time.Since(began)
		klog.FromContext(ctx).V(4).Info("A watch of ResourceSlices has ended", "lasted", lasted, "err", err)
		switch pause = max(minWatchPause, 2*pause); {
		case lasted >= soundWatch:
			pause = 0
		case err != nil:
			pause = min(pause, failedPause)
		default:
			pause = min(pause, maxWatchPause)
		}
		if !loop.Pause(ctx, jitter(pause)) {
			return
		}
	}
}

// follow lists the slices and watches them until the watch ends.
func (w *watcher) follow(ctx context.Context) error {
	version, err := w.list(ctx)
	if err != nil {
		return err
	}
	lasts := watchTime + rand.N(watchJitter) //nolint:gosec // no secret
	ctx, cancel := context.WithTimeout(ctx, lasts+watchGrace)
	defer cancel()
	events, err := w.client.Resource(sliceResource).Watch(ctx, metav1.ListOptions{
		FieldSelector: w.selector, ResourceVersion: version, TimeoutSeconds: ptr.To(int64(lasts / time.Second)),
	})
	if err != nil {
		return fmt.Errorf("watch ResourceSlices: %w", err)
	}
	defer events.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, open := <-events.ResultChan():
			slice, ok := e.Object.(*metav1.PartialObjectMetadata)
			if !open || !ok || e.Type == watch.Error {
				return nil
			}
			w.note(slice, e.Type == watch.Deleted)
		}
	}
}

func (w *watcher) list(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	began := time.Now()
	list, err := w.client.Resource(sliceResource).List(ctx, metav1.ListOptions{FieldSelector: w.selector})
	if err != nil {
		return "", fmt.Errorf("list the metadata of ResourceSlices: %w", err)
	}
	listing := map[types.UID]string{}
	for i := range list.Items {
		listing[list.Items[i].UID] = list.Items[i].ResourceVersion
	}
	w.mu.Lock()
	w.listing, w.listed, w.events = listing, began, map[types.UID]event{}
	w.mu.Unlock()
	w.changed()
	return list.ResourceVersion, nil
}

func (w *watcher) note(slice *metav1.PartialObjectMetadata, deleted bool) {
	w.mu.Lock()
	w.events[slice.UID] = event{slice.ResourceVersion, deleted}
	w.mu.Unlock()
	w.changed()
}

// differs reports whether somebody else made, changed or deleted slices since these were read or written. touched is when
// they were last written, or deleted, by this process: what was listed before that, or is told late, says nothing new.
func (w *watcher) differs(stored []*resourceapi.ResourceSlice, touched map[types.UID]time.Time) (differs bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	known := map[types.UID]string{}
	for _, s := range stored {
		known[s.UID] = s.ResourceVersion
	}
	if w.listing != nil {
		isNews := func(uid types.UID) bool { return known[uid] != w.listing[uid] && touched[uid].Before(w.listed) }
		for uid := range w.listing {
			differs = differs || isNews(uid)
		}
		for uid := range known {
			differs = differs || isNews(uid)
		}
		w.listing = nil
	}
	for uid, e := range w.events {
		version, isKnown := known[uid]
		_, isTouched := touched[uid]
		switch {
		case e.deleted:
			differs = differs || isKnown
			delete(w.events, uid)
		case isKnown:
			differs = differs || newer(e.version, version)
		default:
			differs = differs || !isTouched
		}
	}
	return differs
}

// read drops what a list of the slices themselves, which began at that time and has this version, makes obsolete.
func (w *watcher) read(began time.Time, version string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.listed.Before(began) {
		w.listing = nil
	}
	for uid, e := range w.events {
		if !newer(e.version, version) {
			delete(w.events, uid)
		}
	}
}

// newer compares resource versions of one watch, which are numbers that grow.
func newer(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	if err != nil {
		return a != b
	}
	return order > 0
}
