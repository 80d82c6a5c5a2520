// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/host"
)

func TestPodNames(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	add := func(name string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(folder, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	asked := 0
	n := &PodNames{Roots: host.Roots{PodLogs: folder}, Otherwise: func(_ context.Context, _, uid string) string {
		asked++
		return map[string]string{"u3": "by/claim"}[uid]
	}}
	check := func(uid, want string, wantAsked int) {
		t.Helper()
		asked = 0
		if got := n.Name(t.Context(), pci, uid); got != want || asked != wantAsked {
			t.Errorf("%s: got %q after asking %d times, want %q after %d", uid, got, asked, want, wantAsked)
		}
	}
	add("team_train_u1")
	check("u1", "team/train", 0)
	check("u2", "", 1)
	add("team_other_u2")
	check("u2", "team/other", 0)
	check("u3", "by/claim", 1)
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	check("u1", "team/train", 0)
	check("u4", "", 1)
	check("u2", "team/other", 0)
}
