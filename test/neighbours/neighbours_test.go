// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbours

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/docs/page"
)

var update = flag.Bool("update", false, "write the table")

// TestTable: the page has what the suites saw.
func TestTable(t *testing.T) {
	table, err := Markdown(page.Root(t))
	if err != nil {
		t.Fatal(err)
	}
	page.Generated(t, *update, "docs/reference/compatibility.md", table)
}

// TestNamed: each test and target that a neighbour names exists.
func TestNamed(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(page.Root(t), "test/e2e/*_test.go"))
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	files = append(files, "secondopinion/features_test.go")
	var tests strings.Builder
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		tests.Write(content)
	}
	makefile := page.Read(t, "Makefile")
	for _, n := range All() {
		name, _, _ := strings.Cut(n.Test, "/")
		if n.Test != "" && (!strings.Contains(tests.String(), "func "+name+"(t *testing.T)") || !strings.Contains(makefile, "\n"+n.Target+":")) {
			t.Errorf("%s: there is no %s, or no make %s", n.Name, n.Test, n.Target)
		}
	}
}

// TestRecord: what a test saw is in the table until another version is pinned.
func TestRecord(t *testing.T) {
	root := t.TempDir()
	write := func(path, content string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("test/neighbours/testdata/none", "")
	for _, n := range All() {
		if n.Pin != "" {
			write(n.PinFile, page.Read(t, n.PinFile))
		}
	}
	const kueue = "Kueue"
	if err := Record(root, kueue, "TestKueueQuota", "jobs wait"); err != nil {
		t.Fatal(err)
	}
	if err := Record(root, "Kueu", "TestKueueQuota", "jobs wait"); err == nil {
		t.Error("an unknown neighbour was recorded")
	}
	row := func() string {
		t.Helper()
		table, err := Markdown(root)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(table) {
			if strings.HasPrefix(line, "| "+kueue+" |") {
				return line
			}
		}
		t.Fatalf("no row:\n%s", table)
		return ""
	}
	if got := row(); !strings.Contains(got, "jobs wait (`TestKueueQuota`, `make test-kueue`)") {
		t.Errorf("got %s", got)
	}
	write("test/kueue/go.mod", "\tsigs.k8s.io/kueue v9.9.9 // indirect\n")
	if got := row(); strings.Contains(got, "jobs wait") || !strings.Contains(got, "v9.9.9") {
		t.Errorf("got %s", got)
	}
}
