// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package knownfailures

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCase is what a listed test looks like. Only the processes that TestRun starts run it.
func TestCase(t *testing.T) {
	switch os.Getenv(child) {
	case "TestCase/passes":
		t.Run("passes", func(*testing.T) {})
	case "TestCase/fails":
		t.Run("fails", func(t *testing.T) { t.Error("the promise is broken") })
	case "TestCase/panics":
		t.Run("panics", func(*testing.T) { panic("the promise is broken") })
	case "TestCase/skips":
		t.Run("skips", func(t *testing.T) { t.Skip("without root") })
	default:
		t.Skip("runs in processes of TestRun")
	}
}

// TestRun: what becomes of a listed test, by how it ends. Both ways are red.
func TestRun(t *testing.T) {
	for _, c := range []struct {
		test, says, want string
	}{
		{"TestCase/fails", "the promise is broken", ""},
		{"TestCase/fails", "another promise", "does not say"},
		{"TestCase/passes", "the promise is broken", "take it off the list"},
		{"TestCase/panics", "the promise is broken", "panic"},
		{"TestCase/nowhere", "the promise is broken", "did not run"},
	} {
		t.Run(c.test+" "+c.says, func(t *testing.T) {
			output, failed := run(t.Context(), c.test)
			err := judge(Entry{Package: "test/knownfailures", Test: c.test, Issue: 25, Says: c.says}, output, failed)
			switch {
			case c.want == "" && err != nil:
				t.Errorf("got %v\n%s", err, output)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %v, want %q\n%s", err, c.want, output)
			}
		})
	}
	if output, _ := run(t.Context(), "TestCase/skips"); !skipped(output, "TestCase/skips") {
		t.Errorf("not seen to be skipped:\n%s", output)
	}
	if err := judge(Entry{Test: "TestHangs"}, "", context.DeadlineExceeded); err == nil || !strings.Contains(err.Error(), "could not be run") {
		t.Errorf("a test that hangs: %v", err)
	}
}

// TestUnseen: a listed test that no log has is told.
func TestUnseen(t *testing.T) {
	entries, err := List()
	if err != nil {
		t.Fatal(err)
	}
	var logs strings.Builder
	for i := range entries {
		if i > 0 {
			logs.WriteString("    x_test.go:1: " + entries[i].seen() + " after 1s: it says so\n")
		}
	}
	if unseen, err := Unseen(logs.String()); err != nil || len(entries) > 0 && (len(unseen) != 1 || unseen[0] != entries[0]) {
		t.Errorf("got %v, %v, want the first only", unseen, err)
	}
}

func TestPackageOf(t *testing.T) {
	for function, want := range map[string]string{
		"github.com/partage-dev/partage/pkg/driver/claim.TestRelease":            "pkg/driver/claim",
		"github.com/partage-dev/partage/pkg/driver/claim_test.TestRelease.func1": "pkg/driver/claim",
		"github.com/partage-dev/partage/test/flow/claims.TestRelease.func2.1":    "test/flow/claims",
		"github.com/partage-dev/partage/pkg/kubectl/explain.TestPending.func1":   "pkg/kubectl/explain",
	} {
		if got := packageOf(function); got != want {
			t.Errorf("%s: got %s, want %s", function, got, want)
		}
	}
}

// TestList: each entry is complete and names a test that begins with Expect, and no other test does.
func TestList(t *testing.T) {
	entries, err := List()
	if err != nil {
		t.Fatal(err)
	}

	expecting := expectingTests(t)
	seen, listed := map[Entry]bool{}, map[string]bool{}
	for _, e := range entries {
		key := Entry{Package: e.Package, Test: e.Test}
		function, _, _ := strings.Cut(e.Test, "/")
		switch {
		case seen[key]:
			t.Errorf("%s %s is listed twice", e.Package, e.Test)
		case e.Issue <= 25:
			t.Errorf("%s %s: %d is no issue that mends it", e.Package, e.Test, e.Issue)
		case len(e.Says) < 10 || strings.Contains(e.Says, "\n"):
			t.Errorf("%s %s: says %q, want a part of one line that tells it from other failures", e.Package, e.Test, e.Says)
		case !expecting[e.Package+" "+function]:
			t.Errorf("%s %s is listed, and there is no such test that calls knownfailures.Expect", e.Package, e.Test)
		}
		seen[key], listed[e.Package+" "+function] = true, true
	}
	for test := range expecting {
		if !listed[test] {
			t.Errorf("%s calls knownfailures.Expect and is not listed", test)
		}
	}
	t.Logf("%d known failures in %d tests", len(entries), len(expecting))
}

// expectingTests are the tests of all packages that call Expect, as "pkg/driver/claim TestRelease".
func expectingTests(t *testing.T) map[string]bool {
	t.Helper()
	top, tests := "../..", map[string]bool{}
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if name := entry.Name(); err != nil || entry.IsDir() && path != top && (name == "_output" || name == ".git" || name == "bin" || name == "testdata") {
			if err == nil {
				err = filepath.SkipDir
			}
			return err
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(source), "knownfailures.Expect(") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, source, 0)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(top, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, declaration := range file.Decls {
			if f, is := declaration.(*ast.FuncDecl); is && strings.HasPrefix(f.Name.Name, "Test") && callsExpect(f) {
				tests[folder+" "+f.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tests
}

func callsExpect(f *ast.FuncDecl) bool {
	found := false
	ast.Inspect(f, func(n ast.Node) bool {
		if s, is := n.(*ast.SelectorExpr); is && s.Sel.Name == "Expect" {
			if x, is := s.X.(*ast.Ident); is && x.Name == "knownfailures" {
				found = true
			}
		}
		return !found
	})
	return found
}
