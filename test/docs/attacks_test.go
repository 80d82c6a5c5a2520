// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/docs/page"
)

// TestAttacks: each attack of docs/reference/security-tests.md has tests, and these exist, unless nothing holds it back.
func TestAttacks(t *testing.T) {
	t.Parallel()
	root, exists := page.Root(t), map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, folder := range []string{"cmd", "pkg", "test", "deployments"} {
		if err := filepath.WalkDir(filepath.Join(root, folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			content, err := os.ReadFile(path)
			for _, m := range declared.FindAllSubmatch(content, -1) {
				exists[string(m[1])] = true
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	attacks, named := 0, regexp.MustCompile("^`(Test\\w+)`$")
	for line := range strings.Lines(page.Read(t, "docs/reference/security-tests.md")) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|")+" ", " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if len(cells) != 3 || !strings.Contains(cells[1], "hold") || cells[0] == "attempt" {
			continue
		}
		attacks++
		if cells[2] == "" && strings.HasPrefix(cells[1], "**does not hold**") {
			continue // there is nothing that could show it
		}
		for test := range strings.SplitSeq(cells[2], ", ") {
			if m := named.FindStringSubmatch(test); m == nil || !exists[m[1]] {
				t.Errorf("%q: there is no test %q", cells[0], test)
			}
		}
	}
	if t.Logf("%d attacks", attacks); attacks < 39 {
		t.Errorf("%d attacks", attacks)
	}
}
