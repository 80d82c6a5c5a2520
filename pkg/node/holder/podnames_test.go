// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/node/host"
)

func TestPodNames(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	add := func(name string) {
		t.Helper()
		must(t, os.Mkdir(filepath.Join(folder, name), 0o755))
	}
	n := &PodNames{Roots: host.Roots{PodLogs: folder}}
	check := func(uid, want string) {
		t.Helper()
		if got := n.Name(uid); got != want {
			t.Errorf("%s: got %q, want %q", uid, got, want)
		}
	}
	add("team_train_u1")
	check("u1", "team/train")
	check("u2", "")
	add("team_other_u2")
	check("u2", "team/other")
	must(t, os.RemoveAll(folder))
	check("u1", "team/train")
	check("u4", "")
	check("u2", "team/other")
}
