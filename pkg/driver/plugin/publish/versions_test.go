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

// TestVersions: which versions say that somebody else has changed something.
func TestVersions(t *testing.T) {
	t.Parallel()
	object := func(uid types.UID, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: uid, ResourceVersion: version}}
	}
	all := func(slices ...*metav1.PartialObjectMetadata) []*metav1.PartialObjectMetadata { return slices }
	for name, test := range map[string]struct {
		slices  []*metav1.PartialObjectMetadata
		differs bool
	}{
		"own write":        {slices: all(object("a", "10"))},
		"changed":          {slices: all(object("a", "11")), differs: true},
		"made":             {slices: all(object("a", "10"), object("b", "11")), differs: true},
		"deleted":          {differs: true},
		"in a backup":      {slices: all(object("a", "9")), differs: true},
		"back in a backup": {slices: all(object("a", "10"), object("b", "3")), differs: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stored := []*resourceapi.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{UID: "a", ResourceVersion: "10"}}}
			v := &versions{changed: loop.NewTrigger()}
			now := map[types.UID]metav1.Object{}
			for _, slice := range test.slices {
				now[slice.UID] = slice
			}
			v.note(now)
			if got := v.differ(stored); got != test.differs {
				t.Errorf("differs is %v, want %v", got, test.differs)
			}
		})
	}
}
