// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFind(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"test/cluster", "bin", "pkg/deep/down"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "test/cluster/go.mod"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, from := range [][]string{{root}, {filepath.Join(root, "bin", "cluster")}, {"/", filepath.Join(root, "pkg/deep/down")}} {
		if r, err := Find(from...); err != nil || r.Root != root {
			t.Errorf("Find(%v) = %v, %v; want %s", from, r, err, root)
		}
	}
	if r, err := Find("/"); err == nil {
		t.Errorf("Find(/) = %v, want an error", r)
	}
}

func TestClusterNames(t *testing.T) {
	r := Repo{Root: "/srv/partage"}
	for _, bad := range []string{"", "A", "a_b", "-a", "a-", "../x", strings.Repeat("a", 23)} {
		if _, err := r.Cluster(bad); err == nil {
			t.Errorf("name %q was accepted", bad)
		}
	}
	a, err := r.Cluster("a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := Repo{Root: "/srv/other"}.Cluster("a")
	if err != nil {
		t.Fatal(err)
	}
	if a.ID() == other.ID() {
		t.Errorf("two checkouts share the id %s", a.ID())
	}
	if want := len("partage-a-01234567"); len(a.ID()) != want {
		t.Errorf("id %s, want %d characters", a.ID(), want)
	}
	standard, err := r.Cluster(DefaultName)
	if err != nil || standard.Kubeconfig() != "/srv/partage/_output/cluster/kubeconfig" {
		t.Errorf("kubeconfig %s, %v", standard.Kubeconfig(), err)
	}
}

func TestCheckPlace(t *testing.T) {
	for path, ok := range map[string]bool{
		"/srv/partage": true, "/home/a b/partage": true, "/var/library/x": true,
		"/var/lib/ci/partage": false, "/etc": false, "/run/x": false, "/srv/a,b": false, "/srv/it's": false,
	} {
		if err := (Repo{Root: path}).CheckPlace(); (err == nil) != ok {
			t.Errorf("CheckPlace of %s: %v", path, err)
		}
	}
}
