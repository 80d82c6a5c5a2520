// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

var (
	// guides are the pages with commands for readers to run.
	guides = regexp.MustCompile(`^(docs/(how-to|tutorials)/.*|README\.md)$`)
	// mark says of a block of commands that a test follows it, that a test does the same, or why none does.
	mark = regexp.MustCompile(`^<!-- (?:test: [a-z]+|tested by (Test\w+)|not tested: \S.*) -->$`)
)

// TestCommandsAreTestedOrMarked: before each block of commands is a comment that says how it is tested, or why it is not.
func TestCommandsAreTestedOrMarked(t *testing.T) {
	var tests strings.Builder
	files(t, "_test.go", func(_, content string) { tests.WriteString("\n" + content) })
	blocks := 0
	for path, page := range rawPages(t) {
		if !guides.MatchString(path) {
			continue
		}
		n, faults := unmarked(page, func(name string) bool { return strings.Contains(tests.String(), "\nfunc "+name+"(") })
		blocks += n
		for _, fault := range faults {
			t.Errorf("%s: %s", path, fault)
		}
	}
	if t.Logf("%d cases", blocks); blocks < 70 {
		t.Errorf("only %d blocks", blocks)
	}
}

func TestBrokenMarks(t *testing.T) {
	known := func(name string) bool { return name == "TestA" }
	for page, want := range map[string]int{
		"<!-- test: label -->\n```sh\na\n```\n":                   0,
		"<!-- tested by TestA -->\n```sh\na\n```\n":               0,
		"<!-- not tested: needs hardware -->\n```sh\na\n```\n":    0,
		"1. One:\n\n   <!-- test: one -->\n   ```sh\n   a\n```\n": 0,
		"```sh\na\n```\n": 1,
		"<!-- tested by TestB -->\n```sh\na\n```\n": 1,
		"<!-- not tested -->\n```sh\na\n```\n":      1,
		"```yaml\na: b\n```\n":                      0,
	} {
		if _, faults := unmarked(page, known); len(faults) != want {
			t.Errorf("%q: %q", page, faults)
		}
	}
}

// unmarked returns how many blocks of commands a page has, and what is wrong with the marks before them.
func unmarked(page string, exists func(test string) bool) (blocks int, faults []string) {
	before := ""
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if line == "```sh" {
			blocks++
			switch found := mark.FindStringSubmatch(before); {
			case found == nil:
				faults = append(faults, fmt.Sprintf("block %d of commands: before it is %q, and not how it is tested, or why it is not", blocks, before))
			case found[1] != "" && !exists(found[1]):
				faults = append(faults, fmt.Sprintf("block %d of commands: there is no %s", blocks, found[1]))
			}
		}
		before = line
	}
	return blocks, faults
}
