// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"maps"
	"sync/atomic"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"

	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/metawatch"
)

var sliceResource = resourceapi.SchemeGroupVersion.WithResource("resourceslices")

// versions are the resource versions of this node's slices, from a watch. The slices themselves are
// read only when somebody else has changed them: after a restart of an API server, all
// plugins of a cluster list at the same time.
type versions struct {
	watch metawatch.Watch[*metav1.PartialObjectMetadataList]
	// changed is fired when the watch has news.
	changed loop.Trigger
	watched atomic.Pointer[map[types.UID]string]
}

func newVersions(client metadata.Interface, pool pool) *versions {
	v := &versions{changed: loop.NewTrigger()}
	v.watch = metawatch.Watch[*metav1.PartialObjectMetadataList]{
		Client: client.Resource(sliceResource), What: "the metadata of ResourceSlices", Selector: pool.selector(), Changed: v.note,
	}
	return v
}

func (v *versions) note(slices map[types.UID]metav1.Object) {
	watched := map[types.UID]string{}
	for uid, slice := range slices {
		watched[uid] = slice.GetResourceVersion()
	}
	v.watched.Store(&watched)
	v.changed.Fire()
}

// differ reports whether the watch has other slices, or other versions, than these. Versions may also be older, after etcd was
// restored. A write of this process may not have arrived in the watch yet, which costs a list of the slices.
func (v *versions) differ(stored []*resourceapi.ResourceSlice) bool {
	known := map[types.UID]string{}
	for _, s := range stored {
		known[s.UID] = s.ResourceVersion
	}
	return !maps.Equal(known, *v.watched.Load())
}
