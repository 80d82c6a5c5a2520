// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
)

// TestVersions: which events and lists say that somebody else has changed something.
func TestVersions(t *testing.T) {
	t.Parallel()
	object := func(uid types.UID, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: version}}
	}
	for name, test := range map[string]struct {
		happens func(v *versions)
		differs bool
	}{
		"nothing":         {happens: func(*versions) {}},
		"own write":       {happens: func(v *versions) { v.note(object("a", "10"), false) }},
		"changed":         {happens: func(v *versions) { v.note(object("a", "11"), false) }, differs: true},
		"made":            {happens: func(v *versions) { v.note(object("b", "11"), false) }, differs: true},
		"deleted":         {happens: func(v *versions) { v.note(object("a", "11"), true) }, differs: true},
		"in a backup":     {happens: func(v *versions) { v.listed([]metav1.PartialObjectMetadata{*object("a", "9")}) }, differs: true},
		"not in a backup": {happens: func(v *versions) { v.listed(nil) }, differs: true},
		"back in a backup": {happens: func(v *versions) {
			v.listed([]metav1.PartialObjectMetadata{*object("a", "10"), *object("b", "3")})
		}, differs: true},
		"made and deleted": {happens: func(v *versions) {
			v.note(object("b", "11"), false)
			v.note(object("b", "12"), true)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := &versions{changed: loop.NewTrigger()}
			v.listed([]metav1.PartialObjectMetadata{*object("a", "10")})
			test.happens(v)
			stored := []*resourceapi.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{UID: "a", ResourceVersion: "10"}}}
			if got := v.differ(stored); got != test.differs {
				t.Errorf("differs is %v, want %v", got, test.differs)
			}
		})
	}
}
