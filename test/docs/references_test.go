// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"regexp"
	"strings"
	"testing"
)

// reference is a page that a message, a comment or an alert names.
var reference = regexp.MustCompile(`\b(docs/[\w/-]+\.md)(#[\w-]+)?`)

// TestReferences: pages, and sections of them, that code, charts and manifests name exist.
func TestReferences(t *testing.T) {
	all, references := pages(t), 0
	for _, ending := range []string{".go", ".yaml", ".tpl", ".txt", "Makefile"} {
		files(t, ending, func(path, content string) {
			if strings.HasPrefix(path, "test/docs/") {
				return
			}
			for _, found := range reference.FindAllStringSubmatch(content, -1) {
				references++
				page, exists := all[found[1]]
				if anchor := strings.TrimPrefix(found[2], "#"); !exists || anchor != "" && !anchors(page)[anchor] {
					t.Errorf("%s names %s, which does not exist", path, found[0])
				}
			}
		})
	}
	if t.Logf("%d cases", references); references < 60 {
		t.Errorf("only %d references", references)
	}
}
