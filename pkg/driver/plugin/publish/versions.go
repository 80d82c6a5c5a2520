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

// versions are which slices of this node exist in which version, as a watch tells it. Their content is
// read only when somebody else has changed them: when an API server restarts, all
// plugins of a cluster list their slices again.
type versions struct {
	watch metawatch.Watch[*metav1.PartialObjectMetadataList]
	// changed says that the watch has told something.
	changed loop.Trigger
	told    atomic.Pointer[map[types.UID]string]
}

func newVersions(client metadata.Interface, pool pool) *versions {
	v := &versions{changed: loop.NewTrigger()}
	v.watch = metawatch.Watch[*metav1.PartialObjectMetadataList]{
		Client: client.Resource(sliceResource), What: "the metadata of ResourceSlices", Selector: pool.selector(), Changed: v.note,
	}
	return v
}

func (v *versions) note(slices map[types.UID]metav1.Object) {
	told := map[types.UID]string{}
	for uid, slice := range slices {
		told[uid] = slice.GetResourceVersion()
	}
	v.told.Store(&told)
	v.changed.Fire()
}

// differ reports whether others slices, or other versions, exist than these, older ones too: that is how a restored etcd is
// noticed. What was written just now may not have been told yet, which costs a list of the slices.
func (v *versions) differ(stored []*resourceapi.ResourceSlice) bool {
	known := map[types.UID]string{}
	for _, s := range stored {
		known[s.UID] = s.ResourceVersion
	}
	return !maps.Equal(known, *v.told.Load())
}
