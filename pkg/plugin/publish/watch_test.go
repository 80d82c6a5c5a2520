// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestVersions: which events and lists say that somebody else has changed something. They may
// come before the answer to the request that caused them, or long after it.
func TestVersions(t *testing.T) {
	t.Parallel()
	object := func(uid types.UID, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: version}}
	}
	type told struct {
		object  *metav1.PartialObjectMetadata
		deleted bool
	}
	type listing = map[types.UID]string
	var (
		now    = time.Now()
		before = map[types.UID]time.Time{"a": now.Add(-time.Second), "b": now.Add(-time.Second)}
		after  = map[types.UID]time.Time{"a": now.Add(time.Second), "b": now.Add(time.Second)}
	)
	for name, test := range map[string]struct {
		events []told
		// listing was listed before the events, and read is the version of the list in which the slice was read after them.
		listing listing
		read    string
		touched map[types.UID]time.Time
		differs bool
	}{
		"nothing":               {},
		"own write":             {events: []told{{object("a", "10"), false}}},
		"late":                  {events: []told{{object("a", "9"), false}}},
		"changed":               {events: []told{{object("a", "11"), false}}, differs: true},
		"changed before list":   {events: []told{{object("a", "11"), false}}, read: "11"},
		"changed after list":    {events: []told{{object("a", "12"), false}}, read: "11", differs: true},
		"made":                  {events: []told{{object("b", "11"), false}}, differs: true},
		"made before list":      {events: []told{{object("b", "11"), false}}, read: "12"},
		"made after list":       {events: []told{{object("b", "13"), false}}, read: "12", differs: true},
		"deleted":               {events: []told{{object("a", "11"), true}}, differs: true},
		"made and deleted":      {events: []told{{object("b", "11"), false}, {object("b", "12"), true}}},
		"old one deleted":       {events: []told{{object("b", "11"), true}}, read: "12"},
		"deleted here":          {events: []told{{object("b", "8"), false}, {object("b", "11"), true}}, touched: before},
		"deleted here, not yet": {events: []told{{object("b", "8"), false}}, touched: before},
		"listed":                {listing: listing{"a": "10"}},
		"listed in a backup":    {listing: listing{"a": "9"}, differs: true},
		"absent from a backup":  {listing: listing{}, differs: true},
		"back in a backup":      {listing: listing{"a": "10", "b": "3"}, touched: before, differs: true},
		"written since":         {listing: listing{"a": "9"}, touched: after},
		"made since":            {listing: listing{}, touched: after},
		"deleted since":         {listing: listing{"a": "10", "b": "3"}, touched: after},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stored := []*resourceapi.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{UID: "a", ResourceVersion: "10"}}}
			if test.read != "" {
				stored[0].ResourceVersion = "11"
			}
			w := &versions{changed: func() {}, listing: test.listing, began: now, events: map[types.UID]event{}}
			for _, e := range test.events {
				w.note(e.object, e.deleted)
			}
			if test.read != "" {
				w.read(now, test.read)
			}
			if got := w.differ(stored, test.touched); got != test.differs {
				t.Errorf("differs is %v, want %v", got, test.differs)
			}
		})
	}
}
