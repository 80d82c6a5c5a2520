// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

var (
	sliceResource = resourceapi.SchemeGroupVersion.WithResource("resourceslices")
	nodeResource  = corev1.SchemeGroupVersion.WithResource("nodes")
)

// watcher learns which slices of this node exist in which version. Their content is
// read only when somebody else has changed them: when an API server restarts, all
// plugins of a cluster list their slices again.
type watcher struct {
	client   metadata.Interface
	selector string
	// changed is called after every event, unheard when a watch has shown nothing to be
	// relied on.
	changed, unheard func()
	// pause is that before the next watch, which may begin at next. They are for the
	// goroutine that watches.
	pause time.Duration
	next  time.Time

	mu   sync.Mutex
	seen map[types.UID]seenSlice
	// initial are the slices with which the first watch began, nil until it has and once they were
	// compared with expected, slices that were read some time before.
	initial, expected sets.Set[types.UID]
}

const (
	// watchGrace is how much longer a watch may last than the API server was asked for.
	watchGrace = 30 * time.Second
	// soundWatch is how long a watch lasts at least where nothing is wrong. After a
	// shorter one client-go may begin another at once, which is why there are pauses.
	soundWatch                   = 10 * time.Second
	minWatchPause, maxWatchPause = 2 * time.Second, 5 * time.Minute
)

// seenSlice is the last event of a slice.
type seenSlice struct {
	resourceVersion string
	deleted         bool
}

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) {
	store, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(
			&cache.ListWatch{ListWithContextFunc: w.list, WatchFuncWithContext: w.watch}, w.client),
		ObjectType: &metav1.PartialObjectMetadata{},
		Transform:  versionOnly,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(object any) { w.note(object, false) },
			UpdateFunc: func(_, object any) { w.note(object, false) },
			DeleteFunc: func(object any) { w.note(object, true) },
		},
	})
	var synced sync.WaitGroup
	defer synced.Wait()
	synced.Go(func() {
		select {
		case <-informer.HasSyncedChecker().Done():
			w.began(store.List())
		case <-ctx.Done():
		}
	})
	informer.RunWithContext(ctx)
}

// began notes the slices with which the first watch began.
func (w *watcher) began(objects []any) {
	initial := sets.New[types.UID]()
	for _, object := range objects {
		if slice, ok := object.(*metav1.PartialObjectMetadata); ok {
			initial.Insert(slice.UID)
		}
	}
	w.mu.Lock()
	w.initial = initial
	w.mu.Unlock()
	w.changed()
}

// expect notes slices that were read before the first watch began. A watch does not tell of those
// that were deleted in between.
func (w *watcher) expect(stored map[types.UID]*resourceapi.ResourceSlice) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expected = sets.KeySet(stored)
}

func (w *watcher) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	o.FieldSelector = w.selector
	return w.client.Resource(sliceResource).List(ctx, o)
}

// watch begins a watch. The API server is asked to end it after some minutes. If it does
// not, it or something on the way to it hangs.
func (w *watcher) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if !loop.Pause(ctx, time.Until(w.next)) {
		return nil, ctx.Err()
	}
	limit := watchGrace
	if o.TimeoutSeconds != nil {
		limit += time.Duration(*o.TimeoutSeconds) * time.Second
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	began := time.Now()
	o.FieldSelector = w.selector
	events, err := w.client.Resource(sliceResource).Watch(limited, o)
	if err != nil {
		w.ended(ctx, limited, soundWatch)
		cancel()
		return nil, err
	}
	return limitedWatch{events, sync.OnceFunc(func() {
		w.ended(ctx, limited, time.Since(began))
		cancel()
	})}, nil
}

// ended has the slices read where a watch cannot be relied on: it ended too soon, or not
// before its limit.
func (w *watcher) ended(ctx, limited context.Context, lasted time.Duration) {
	tooLong, tooShort := limited.Err() != nil, lasted < soundWatch
	switch {
	case ctx.Err() != nil:
		return
	case tooShort:
		w.pause = min(max(minWatchPause, 2*w.pause), maxWatchPause)
	default:
		w.pause = 0
	}
	w.next = time.Now().Add(wait.Jitter(w.pause, 0.5))
	if tooShort || tooLong {
		klog.FromContext(ctx).V(2).Info("A watch of ResourceSlices was cut short or did not end, reading them", "lasted", lasted)
		w.unheard()
	}
}

// limitedWatch is a watch that is told when it ends.
type limitedWatch struct {
	watch.Interface
	ended func()
}

func (w limitedWatch) Stop() {
	w.Interface.Stop()
	w.ended()
}

func versionOnly(object any) (any, error) {
	slice, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		return object, nil
	}
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: slice.Name, UID: slice.UID, ResourceVersion: slice.ResourceVersion,
	}}, nil
}

func (w *watcher) note(object any, deleted bool) {
	if unseen, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unseen.Obj
	}
	slice, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		return
	}
	w.mu.Lock()
	if w.seen == nil {
		w.seen = map[types.UID]seenSlice{}
	}
	w.seen[slice.UID] = seenSlice{slice.ResourceVersion, deleted}
	w.mu.Unlock()
	w.changed()
}

// differs reports whether somebody else made, changed or deleted slices since these
// were read or written. Events that are late, or of the own writes, say nothing new.
func (w *watcher) differs(stored map[types.UID]*resourceapi.ResourceSlice, removed map[types.UID]bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	differs := false
	if w.initial != nil {
		for uid := range w.expected.Difference(w.initial) {
			differs = differs || stored[uid] != nil
		}
		w.initial, w.expected = nil, nil
	}
	for uid, seen := range w.seen {
		slice := stored[uid]
		switch {
		case seen.deleted:
			differs = differs || slice != nil
			delete(w.seen, uid)
			delete(removed, uid)
		case slice != nil:
			differs = differs || newer(seen.resourceVersion, slice.ResourceVersion)
		case !removed[uid]:
			differs = true
		}
	}
	return differs
}

// forget drops the events that a list of these slices makes obsolete.
func (w *watcher) forget(stored map[types.UID]*resourceapi.ResourceSlice, listed string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, seen := range w.seen {
		// A deletion that a watch has missed has an old version. UIDs do not come back.
		if seen.deleted && stored[uid] == nil || !seen.deleted && !newer(seen.resourceVersion, listed) {
			delete(w.seen, uid)
		}
	}
}

// newer compares resource versions, which are numbers that grow.
func newer(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	if err != nil {
		return a != b
	}
	return order > 0
}
