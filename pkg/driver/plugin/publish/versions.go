// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"maps"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

	mu   sync.Mutex
	told map[types.UID]string
}

func newVersions(client metadata.Interface, pool pool) *versions {
	v := &versions{changed: loop.NewTrigger(), told: map[types.UID]string{}}
	v.watch = metawatch.Watch[*metav1.PartialObjectMetadataList]{
		Client: client.Resource(sliceResource), What: "the metadata of ResourceSlices", Selector: pool.selector(),
		Listed:  func(l *metav1.PartialObjectMetadataList) { v.listed(l.Items) },
		Changed: v.note,
	}
	return v
}

// listed takes what a watch begins with.
func (v *versions) listed(slices []metav1.PartialObjectMetadata) {
	told := map[types.UID]string{}
	for i := range slices {
		told[slices[i].UID] = slices[i].ResourceVersion
	}
	v.mu.Lock()
	v.told = told
	v.mu.Unlock()
	v.changed.Fire()
}

func (v *versions) note(object runtime.Object, deleted bool) {
	slice, is := object.(*metav1.PartialObjectMetadata)
	if !is {
		return
	}
	v.mu.Lock()
	v.told[slice.UID] = slice.ResourceVersion
	if deleted {
		delete(v.told, slice.UID)
	}
	v.mu.Unlock()
	v.changed.Fire()
}

// differ reports whether others slices, or other versions, exist than these, older ones too: that is how a restored etcd is
// noticed. What was written just now may not have been told yet, which costs a list of the slices.
func (v *versions) differ(stored []*resourceapi.ResourceSlice) bool {
	known := map[types.UID]string{}
	for _, s := range stored {
		known[s.UID] = s.ResourceVersion
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return !maps.Equal(known, v.told)
}
