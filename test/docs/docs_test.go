// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/docs/snippet"
)

const root = "../.."

var (
	heading    = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	codeBlock  = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	link       = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	linkText   = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	noAnchor   = regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
	makeTarget = regexp.MustCompile("`make ([a-z][a-z0-9-]*)")
	testName   = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)`")
	chartValue = regexp.MustCompile("`([a-z][A-Za-z]*(?:\\.[a-z][A-Za-z]*)+)[`=]")
)

// files calls do with the path, from the root, and the content of each file with an
// ending, without those that were built.
func files(t *testing.T, ending string, do func(path, content string)) {
	t.Helper()
	if err := snippet.Files(root, ending, do); err != nil {
		t.Fatal(err)
	}
}

// rawPages are the documentation's, by path.
func rawPages(t *testing.T) map[string]string {
	t.Helper()
	all, err := snippet.Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// pages are the documentation's, by path, without blocks of code.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := rawPages(t)
	for path, content := range all {
		all[path] = codeBlock.ReplaceAllString(content, "")
	}
	return all
}

// anchors are those that GitHub makes of a page's headings.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, found := range heading.FindAllStringSubmatch(page, -1) {
		text := linkText.ReplaceAllString(found[1], "$1")
		anchor := strings.ReplaceAll(noAnchor.ReplaceAllString(strings.ToLower(strings.TrimSpace(text)), ""), " ", "-")
		first := anchor
		for n := 1; all[anchor]; n++ {
			anchor = fmt.Sprintf("%s-%d", first, n)
		}
		all[anchor] = true
	}
	return all
}

func TestLinks(t *testing.T) {
	all, links := pages(t), 0
	for path, page := range all {
		for _, found := range link.FindAllStringSubmatch(page, -1) {
			file, anchor, _ := strings.Cut(found[1], "#")
			links++
			if strings.Contains(file, "://") {
				if err := checkURL(found[1]); err != nil {
					t.Errorf("%s: %v", path, err)
				}
				continue
			}
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: link to %s: there is no %s", path, found[1], target)
			} else if anchor != "" && !anchors(all[target])[anchor] {
				t.Errorf("%s: link to %s: %s has no such heading", path, found[1], target)
			}
		}
	}
	if t.Logf("%d cases", links); links < 100 {
		t.Errorf("only %d links", links)
	}
}

// checkURL: links to other sites have the form of one, and are encrypted. They are not followed.
func checkURL(text string) error {
	to, err := url.Parse(text)
	if err != nil {
		return fmt.Errorf("parse a link: %w", err)
	}
	if to.Scheme != "https" || !strings.Contains(to.Hostname(), ".") || strings.ContainsAny(text, " <>\"") {
		return fmt.Errorf("link to %s: want https://, and the name of a site", text)
	}
	return nil
}

func TestBrokenURLs(t *testing.T) {
	for text, want := range map[string]bool{
		"https://example.com/a#b": true, "http://example.com": false, "https://example": false, "https://": false, "htps://example.com": false,
		"https://example.com/%zz": false,
	} {
		if err := checkURL(text); (err == nil) != want {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestNames: targets of make and tests that pages name exist.
func TestNames(t *testing.T) {
	var makefile, tests strings.Builder
	files(t, "Makefile", func(_, content string) { makefile.WriteString("\n" + content) })
	files(t, "_test.go", func(_, content string) { tests.WriteString("\n" + content) })
	names := 0
	for path, page := range pages(t) {
		for _, found := range makeTarget.FindAllStringSubmatch(page, -1) {
			if names++; !strings.Contains(makefile.String(), "\n"+found[1]+":") {
				t.Errorf("%s: there is no target %s in the Makefile", path, found[1])
			}
		}
		for _, found := range testName.FindAllStringSubmatch(page, -1) {
			if names++; !strings.Contains(tests.String(), "\nfunc "+found[1]+"(") {
				t.Errorf("%s: there is no test %s", path, found[1])
			}
		}
	}
	if t.Logf("%d cases", names); names < 60 {
		t.Errorf("only %d names", names)
	}
}

// chartValues are the chart's defaults.
func chartValues(t *testing.T) map[string]any {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, "deployments/helm/partage/values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]any{}
	if err := yaml.Unmarshal(content, &values); err != nil {
		t.Fatal(err)
	}
	return values
}

// hasValue reports whether the chart has a value. What is below a section without entries, or
// in a node selector, is not looked at.
func hasValue(values map[string]any, name string) bool {
	section := values
	for key := range strings.SplitSeq(name, ".") {
		value, exists := section[key]
		if !exists {
			return false
		}
		inner, isSection := value.(map[string]any)
		if !isSection || len(inner) == 0 || key == "nodeSelector" {
			return true
		}
		section = inner
	}
	return true
}

// TestValues: values of the chart that pages name exist. What is below a section without
// entries, such as the sharing policy, is not looked at, and neither is the changelog,
// which also names those that are gone.
func TestValues(t *testing.T) {
	values := chartValues(t)
	delete(values, "sharingPolicy")
	names := 0
	for path, page := range pages(t) {
		if path == "CHANGELOG.md" {
			continue
		}
		for _, found := range chartValue.FindAllStringSubmatch(page, -1) {
			first, _, _ := strings.Cut(found[1], ".")
			if _, isSection := values[first].(map[string]any); !isSection {
				continue
			}
			if names++; !hasValue(values, found[1]) {
				t.Errorf("%s: the chart has no value %s", path, found[1])
			}
		}
	}
	if t.Logf("%d cases", names); names < 40 {
		t.Errorf("only %d values", names)
	}
}

// output is a block of code that shows a command and what a golden file has of its output, as
//
//	<!-- output of pkg/kubectl/tree/testdata/team.txt -->
//	```console
//	$ kubectl gpu tree
//	...
//	```
var output = regexp.MustCompile("(?ms)^<!-- output of (\\S+) -->\n```console\n\\$ [^\n]*\n(.*?)^```$")

// TestOutputs: outputs that pages show are those that golden files have, line by line. A line
// with an ellipsis stands for any number of lines.
func TestOutputs(t *testing.T) {
	outputs := 0
	files(t, ".md", func(path, content string) {
		for _, found := range output.FindAllStringSubmatch(content, -1) {
			outputs++
			golden, err := os.ReadFile(filepath.Join(root, found[1]))
			if err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			if line, has := hasLines(string(golden), found[2]); !has {
				t.Errorf("%s: %s does not have, or has earlier: %s", path, found[1], line)
			}
		}
		if shown := strings.Count(content, "\n<!-- output of "); shown != len(output.FindAllString(content, -1)) {
			t.Errorf("%s: of %d comments not each is followed by a block of code", path, shown)
		}
	})
	if t.Logf("%d cases", outputs); outputs < 4 {
		t.Errorf("only %d outputs", outputs)
	}
}

// fileComment is the comment before a block of code that shows a part of a file, as
//
//	<!-- file demo/whole-gpu/demo.yaml -->
var fileComment = regexp.MustCompile(`^<!-- file (\S+) -->$`)

// wrongPart returns what a block that shows a part of a file has and the file does not.
func wrongPart(b snippet.Block) error {
	found := fileComment.FindStringSubmatch(b.Before)
	content, err := os.ReadFile(filepath.Join(root, found[1]))
	if err != nil {
		return fmt.Errorf("read what is shown: %w", err)
	}
	if line, has := hasLines(string(content), "…\n"+b.Text); !has {
		return fmt.Errorf("%s does not have, or has earlier: %s", found[1], line)
	}
	return nil
}

// TestFiles: what pages show of files is in them, line by line. A line with an ellipsis stands for
// any number of lines.
func TestFiles(t *testing.T) {
	shown := 0
	for path, page := range rawPages(t) {
		comments := 0
		for _, b := range snippet.Blocks(path, page, "yaml", "sh") {
			if !fileComment.MatchString(b.Before) {
				continue
			}
			if comments++; wrongPart(b) != nil {
				t.Errorf("%v: %v", b, wrongPart(b))
			}
		}
		if n := strings.Count(page, "\n<!-- file "); n != comments {
			t.Errorf("%s: of %d comments not each is followed by a block of code", path, n)
		}
		shown += comments
	}
	if t.Logf("%d cases", shown); shown < 10 {
		t.Errorf("only %d parts of files", shown)
	}
}

func TestBrokenFiles(t *testing.T) {
	for text, want := range map[string]bool{
		"<!-- file templates/whole-gpu.yaml -->\n```yaml\nkind: Pod\nmetadata:\n  name: whole-gpu\n```\n": true,
		"<!-- file templates/whole-gpu.yaml -->\n```yaml\nkind: Pod\n…\n  name: whole-gpu\n```\n":         true,
		"<!-- file templates/whole-gpu.yaml -->\n```yaml\nkind: Pod\nmetadata:\n  name: others\n```\n":    false,
		"<!-- file templates/nothing.yaml -->\n```yaml\nkind: Pod\n```\n":                                 false,
	} {
		blocks := snippet.Blocks("page.md", text, "yaml")
		if len(blocks) != 1 {
			t.Fatalf("%s: %d blocks", text, len(blocks))
		}
		if err := wrongPart(blocks[0]); (err == nil) != want {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// hasLines reports whether a text has the lines of a part of it, and otherwise which one not.
func hasLines(text, part string) (line string, has bool) {
	lines, skips := strings.Split(text, "\n"), false
	for line := range strings.SplitSeq(strings.TrimSuffix(part, "\n"), "\n") {
		if line == "…" {
			skips = true
			continue
		}
		at := slices.Index(lines, line)
		if at < 0 || at > 0 && !skips {
			return line, false
		}
		lines, skips = lines[at+1:], false
	}
	return "", true
}

func TestHasLines(t *testing.T) {
	for part, want := range map[string]bool{
		"a\nb\n": true, "a\n…\nc\n": true, "…\nb\n": true, "…\nc\n…\n": true,
		"b\n": false, "a\nc\n": false, "…\nc\nb\n": false, "x\n": false,
	} {
		if _, has := hasLines("a\nb\nc\n", part); has != want {
			t.Errorf("%q: %v", part, has)
		}
	}
}
