// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

var sliceResource = resourceapi.SchemeGroupVersion.WithResource("resourceslices")

// versions are which slices of this node exist in which version. Their content is
// read only when somebody else has changed them: when an API server restarts, all
// plugins of a cluster list their slices again.
type versions struct {
	// changed is called after every event and list.
	changed func()

	mu sync.Mutex
	// listing has the versions of the last list, which began at a time; nil once it was compared.
	listing map[types.UID]string
	began   time.Time
	// events are the last ones since then.
	events map[types.UID]event
}

// event is the last one of a slice.
type event struct {
	version string
	deleted bool
}

// listed takes what a watch begins with.
func (v *versions) listed(slices []metav1.PartialObjectMetadata, began time.Time) {
	listing := map[types.UID]string{}
	for i := range slices {
		listing[slices[i].UID] = slices[i].ResourceVersion
	}
	v.mu.Lock()
	v.listing, v.began, v.events = listing, began, map[types.UID]event{}
	v.mu.Unlock()
	v.changed()
}

func (v *versions) note(slice *metav1.PartialObjectMetadata, deleted bool) {
	v.mu.Lock()
	v.events[slice.UID] = event{slice.ResourceVersion, deleted}
	v.mu.Unlock()
	v.changed()
}

// differ reports whether somebody else made, changed or deleted slices since these were read or written. touched is when
// they were last written, or deleted, by this process: what was listed before that, or is told late, says nothing new.
func (v *versions) differ(stored []*resourceapi.ResourceSlice, touched map[types.UID]time.Time) (differ bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	known := map[types.UID]string{}
	for _, s := range stored {
		known[s.UID] = s.ResourceVersion
	}
	if v.listing != nil {
		isNews := func(uid types.UID) bool { return known[uid] != v.listing[uid] && touched[uid].Before(v.began) }
		for uid := range v.listing {
			differ = differ || isNews(uid)
		}
		for uid := range known {
			differ = differ || isNews(uid)
		}
		v.listing = nil
	}
	for uid, e := range v.events {
		version, isKnown := known[uid]
		_, isTouched := touched[uid]
		switch {
		case e.deleted:
			differ = differ || isKnown
			delete(v.events, uid)
		case isKnown:
			differ = differ || newer(e.version, version)
		default:
			differ = differ || !isTouched
		}
	}
	return differ
}

// read drops what a list of the slices themselves, which began at that time and has this version, makes obsolete.
func (v *versions) read(began time.Time, version string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.began.Before(began) {
		v.listing = nil
	}
	for uid, e := range v.events {
		if !newer(e.version, version) {
			delete(v.events, uid)
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
