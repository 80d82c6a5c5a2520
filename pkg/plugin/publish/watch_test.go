// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// TestWatcher: which events say that somebody else has changed something. Events may
// come before the answer to the request that caused them, or long after it.
func TestWatcher(t *testing.T) {
	t.Parallel()
	object := func(uid types.UID, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: version}}
	}
	type event struct {
		object  any
		deleted bool
	}
	for name, test := range map[string]struct {
		events []event
		// listed is the version of a list that was read after the events.
		listed  string
		removed []types.UID
		differs bool
	}{
		"nothing":               {},
		"own write":             {events: []event{{object("a", "10"), false}}},
		"late":                  {events: []event{{object("a", "9"), false}}},
		"changed":               {events: []event{{object("a", "11"), false}}, differs: true},
		"changed before list":   {events: []event{{object("a", "11"), false}}, listed: "11"},
		"changed after list":    {events: []event{{object("a", "12"), false}}, listed: "11", differs: true},
		"made":                  {events: []event{{object("b", "11"), false}}, differs: true},
		"made before list":      {events: []event{{object("b", "11"), false}}, listed: "12"},
		"made after list":       {events: []event{{object("b", "13"), false}}, listed: "12", differs: true},
		"deleted":               {events: []event{{object("a", "11"), true}}, differs: true},
		"deletion was missed":   {events: []event{{cache.DeletedFinalStateUnknown{Obj: object("a", "3")}, true}}, listed: "12", differs: true},
		"made and deleted":      {events: []event{{object("b", "11"), false}, {object("b", "12"), true}}},
		"old one deleted":       {events: []event{{object("b", "11"), true}}, listed: "12"},
		"deleted here":          {events: []event{{object("b", "8"), false}, {object("b", "11"), true}}, removed: []types.UID{"b"}},
		"deleted here, not yet": {events: []event{{object("b", "8"), false}}, removed: []types.UID{"b"}},
		"of no slice":           {events: []event{{"a", true}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stored := map[types.UID]*resourceapi.ResourceSlice{"a": {ObjectMeta: metav1.ObjectMeta{UID: "a", ResourceVersion: "10"}}}
			if test.listed != "" {
				stored["a"].ResourceVersion = "11"
			}
			removed := map[types.UID]bool{}
			for _, uid := range test.removed {
				removed[uid] = true
			}
			w := &watcher{changed: func() {}}
			for _, e := range test.events {
				w.note(e.object, e.deleted)
			}
			if test.listed != "" {
				w.forget(stored, test.listed)
			}
			if got := w.differs(stored, removed); got != test.differs {
				t.Errorf("differs is %v, want %v", got, test.differs)
			}
		})
	}
}
