// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// watchSlices asks for a check whenever a ResourceSlice of this node is deleted,
// until ctx ends.
//
// A kubelet that starts deletes all slices of its node, sooner or later than it
// registers the plugin, and the slice controller puts slices back 30 s after it
// saw them deleted. It does so at once when it is asked to publish.
func (p *Plugin) watchSlices(ctx context.Context) {
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.FieldSelector = p.ownSlices()
				return p.slices.ResourceSlices().List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.FieldSelector = p.ownSlices()
				return p.slices.ResourceSlices().Watch(ctx, o)
			},
		}, p.slices),
		ObjectType: &resourceapi.ResourceSlice{},
		// What it holds is not used.
		Transform: nameOnly,
		Handler: cache.ResourceEventHandlerFuncs{
			DeleteFunc: func(any) { signal(p.recheck) },
		},
	})
	p.background.Go(func() {
		// What was deleted before the watch began is not seen by it.
		if cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			signal(p.recheck)
		}
	})
	informer.RunWithContext(ctx)
}

// ownSlices selects the slices of this driver on this node.
func (p *Plugin) ownSlices() string {
	return fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.DriverName,
		resourceapi.ResourceSliceSelectorNodeName: p.NodeName,
	}.String()
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

// missing tells whether slices of the pool were deleted. A pool that is complete
// with another content is somebody else's: while two instances overlap, each may
// have its own idea, and reacting to the other's would go on and on.
func (p *Plugin) missing(ctx context.Context) bool {
	stored, err := p.storedSlices(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not check the ResourceSlices, publishing them again")
		return true
	}
	if err := whole(stored); err != nil {
		klog.FromContext(ctx).Info("ResourceSlices were deleted, publishing them again", "reason", err)
		return true
	}
	return false
}
