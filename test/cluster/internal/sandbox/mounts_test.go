// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMountsBelow(t *testing.T) {
	const mounts = `22 27 0:21 / /proc rw,relatime - proc proc rw
30 27 0:25 / /srv/run/a rw - tmpfs tmpfs rw
31 30 0:25 / /srv/run/a/disk rw - tmpfs tmpfs rw
32 30 0:25 / /srv/run/a/disk/b rw - tmpfs tmpfs rw
33 30 0:25 / /srv/run/ab rw - tmpfs tmpfs rw
`
	want := []string{"/srv/run/a/disk", "/srv/run/a/disk/b"}
	if diff := cmp.Diff(want, mountsBelow(mounts, "/srv/run/a")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
