// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const (
	root    = "../.."
	version = "v98.7.6"
	pins    = "deployments/container/base-images"
	chart   = "deployments/helm/partage/Chart.yaml"
	comment = "<!-- before the first release -->"
)

var (
	denial   = regexp.MustCompile(`(?i)\bno (release|published image)\b|(not|none|no release)( has)? been (released|published|made)|without a release|will have an archive`)
	released = regexp.MustCompile(`(?m)^## \[[0-9]`)
	// What nobody can see who has had no release.
	changes = regexp.MustCompile(`(?m)^### (Changed|Deprecated|Removed|Fixed)$`)
)

// checkout has the documents and what makes a release, in a repository of its own.
type checkout string

func newCheckout(t *testing.T) checkout {
	t.Helper()
	dir := checkout(t.TempDir())
	listed, err := exec.CommandContext(t.Context(), "git", "-C", root, "ls-files", "*.md", "deployments/release", chart).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields(string(listed)) {
		content, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		dir.write(t, name, string(content))
	}
	dir.run(t, "git", "init", "--quiet")
	dir.run(t, "git", "add", "--all")
	return dir
}

func (dir checkout) write(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(string(dir), name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

func (dir checkout) read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(string(dir), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func (dir checkout) try(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir = string(dir)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (dir checkout) run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := dir.try(t, args...)
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return out
}

// denials returns the places of documents that say that there is no release, but for the changelog's and those that tell how one is made.
func (dir checkout) denials(t *testing.T) (places []string) {
	t.Helper()
	for _, name := range strings.Fields(dir.run(t, "git", "ls-files", "*.md")) {
		if name == "docs/contributing/release.md" {
			continue
		}
		for _, line := range strings.Split(dir.read(t, name), "\n") {
			if denial.MatchString(line) || strings.Contains(line, comment) {
				places = append(places, name+": "+line)
			}
		}
	}
	return places
}

// TestPrepare: prepare makes of this checkout one that passes check, and no document denies the release any more. Until the first
// one they do, and check refuses.
func TestPrepare(t *testing.T) {
	t.Parallel()
	dir := newCheckout(t)
	wasReleased := released.MatchString(dir.read(t, "CHANGELOG.md"))
	if denials := dir.denials(t); wasReleased && len(denials) > 0 {
		t.Errorf("there is a release, and these deny it:\n%s", strings.Join(denials, "\n"))
	} else if !wasReleased && len(denials) < 8 {
		t.Errorf("there is no release, and only these say so:\n%s", strings.Join(denials, "\n"))
	}
	out, err := dir.try(t, "deployments/release/check", version)
	for _, want := range []string{chart + ": version is", chart + ": appVersion is", `CHANGELOG.md: no section "## [98.7.6] - DATE"`, pins + " does not exist"} {
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("before: check says nothing of %s: %v\n%s", want, err, out)
		}
	}
	if !wasReleased && !strings.Contains(out, "these say that there is no release: ") {
		t.Errorf("before: check says nothing of documents\n%s", out)
	}

	dir.run(t, "deployments/release/prepare", version, "2026-12-24")
	dir.write(t, pins, "")
	if denials := dir.denials(t); len(denials) > 0 {
		t.Errorf("after: these say that there is no release:\n%s", strings.Join(denials, "\n"))
	}
	if notes := dir.run(t, "deployments/release/check", version); !strings.Contains(notes, "### Added") || !wasReleased && changes.MatchString(notes) {
		t.Errorf("the notes are\n%s", notes)
	}
	if changelog := dir.read(t, "CHANGELOG.md"); !strings.Contains(changelog, "\n## [Unreleased]\n\n## [98.7.6] - 2026-12-24\n") {
		t.Errorf("the changelog begins with\n%.500s", changelog)
	}
	if out, err := dir.try(t, "deployments/release/prepare", version); err == nil || !strings.Contains(out, "has a section 98.7.6 already") {
		t.Errorf("the second time: %v\n%s", err, out)
	}
	if out, err := dir.try(t, "deployments/release/check", "v98.7.7"); err == nil || !strings.Contains(out, "want 98.7.7") {
		t.Errorf("another version: %v\n%s", err, out)
	}
}

// TestComments: what is between the comments goes, by lines and in a line, and what is to come comes.
func TestComments(t *testing.T) {
	t.Parallel()
	dir := newCheckout(t)
	dir.write(t, "a.md", "One."+comment+" None.<!-- then: --> Two.\n\n"+comment+"\nNone\nat all.\n<!-- then: -->\n\n"+
		"A release "+comment+"will have<!-- then: has --> all.\n"+comment+"\nBuild it.\n<!-- then: Take it. -->\nEnd.\n")
	dir.run(t, "git", "add", "a.md")
	dir.run(t, "deployments/release/prepare", version)
	if got, want := dir.read(t, "a.md"), "One. Two.\n\nA release has all.\nTake it.\nEnd.\n"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestNotes: the notes are the section of the version, with links that work elsewhere.
func TestNotes(t *testing.T) {
	t.Parallel()
	dir := newCheckout(t)
	dir.run(t, "deployments/release/prepare", version)
	dir.write(t, pins, "")
	dir.write(t, "CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n\nlater\n\n## [98.7.6] - 2026-12-24\n\n* [new](docs/README.md), [site](https://example.com/docs/)\n\n"+
		"## [98.7.5] - 2026-12-23\n\nbefore\n")
	want := "* [new](https://github.com/partage-dev/partage/blob/v98.7.6/docs/README.md), [site](https://example.com/docs/)"
	if got := strings.TrimSpace(dir.run(t, "deployments/release/check", version)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"check", "prepare"} {
		for _, wrong := range []string{"", "1.2.3", "v1.2", "v1.2.3|g", "devel"} {
			out, err := exec.CommandContext(t.Context(), filepath.Join(root, "deployments/release", program), wrong).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "a version such as v0.1.0") {
				t.Errorf("%s %q: %v: %s", program, wrong, err, out)
			}
		}
	}
}
