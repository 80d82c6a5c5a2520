// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/progress"
)

func TestVersionsOfThisCheckout(t *testing.T) {
	repo, err := layout.Find(".")
	if err != nil {
		t.Fatal(err)
	}
	versions, err := Versions(repo)
	if err != nil {
		t.Fatal(err)
	}
	if v := versions[kubeModule]; !strings.HasPrefix(v, "v1.37.") {
		t.Errorf("Kubernetes %s, want 1.37", v)
	}
	for _, s := range steps(repo, versions) {
		if len(s.packages) == 0 || len(s.programs) == 0 || (len(s.links) > 0 && len(s.programs) != 1) {
			t.Errorf("step %+v", s)
		}
	}
}

func TestKubeVersionFlags(t *testing.T) {
	got := kubeVersionFlags("v1.37.1")
	for _, want := range []string{"version.gitVersion=v1.37.1 ", "version.gitMajor=1 ", "version.gitMinor=37 "} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
}

// A step is current only when nothing that goes into it or comes out of it has changed.
func TestCurrent(t *testing.T) {
	root := t.TempDir()
	repo := layout.Repo{Root: root}
	file := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file("test/cluster/go.mod", "module m")
	file("test/cluster/go.sum", "sum")
	file("test/cluster/cmd/tool/main.go", "package main")
	file("_output/cluster/bin/tool", "program")
	b := Builder{Repo: repo, Progress: progress.New(&bytes.Buffer{})}
	s := step{name: "a tool", packages: []string{"./cmd/tool"}, out: repo.Bin(), programs: []string{"tool"}, links: []string{"other"}, sources: []string{"cmd/tool"}}
	current := func() bool {
		t.Helper()
		stamp, err := b.stamp(s)
		if err != nil {
			t.Fatal(err)
		}
		return b.current(s, stamp)
	}
	finish := func() {
		t.Helper()
		stamp, err := b.stamp(s)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.finish(s, stamp); err != nil {
			t.Fatal(err)
		}
	}
	if current() {
		t.Error("current before the first build")
	}
	finish()
	if !current() {
		t.Error("not current after a build")
	}
	for name, change := range map[string]func(){
		"source":  func() { file("test/cluster/cmd/tool/main.go", "package main // changed") },
		"version": func() { file("test/cluster/go.sum", "another sum") },
		"flags":   func() { s.ldflags += "-s" },
		"link":    func() { _ = os.Remove(filepath.Join(repo.Bin(), "other")) },
	} {
		change()
		if current() {
			t.Errorf("current after a change of %s", name)
		}
		finish()
	}
}
