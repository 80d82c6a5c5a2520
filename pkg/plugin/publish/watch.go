// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// watch asks for a recheck whenever a ResourceSlice of this node is deleted, until
// ctx ends.
//
// A kubelet that starts deletes all slices of its node, before or after it
// registers the plugin, and the slice controller puts slices back 30 s after it
// saw them deleted. It does so at once when it is asked to publish.
func (p *Publisher) watch(ctx context.Context) {
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.FieldSelector = p.ownSlices()
				return p.client.ResourceSlices().List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.FieldSelector = p.ownSlices()
				return p.client.ResourceSlices().Watch(ctx, o)
			},
		}, p.client),
		ObjectType: &resourceapi.ResourceSlice{},
		// What it holds is not used.
		Transform: nameOnly,
		Handler: cache.ResourceEventHandlerFuncs{
			DeleteFunc: func(any) { p.Recheck() },
		},
	})
	var syncing sync.WaitGroup
	defer syncing.Wait()
	syncing.Go(func() {
		// What was deleted before the watch began is not seen by it.
		if cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			p.Recheck()
		}
	})
	informer.RunWithContext(ctx)
}

func nameOnly(object any) (any, error) {
	slice, ok := object.(*resourceapi.ResourceSlice)
	if !ok {
		return object, nil
	}
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{
		Name: slice.Name, UID: slice.UID, ResourceVersion: slice.ResourceVersion,
	}}, nil
}
