// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
)

const start = "docs/README.md"

// TestReachable: a reader who begins at the start page of the documentation finds every page of it there, or on
// an index page (a README.md) to which it leads.
func TestReachable(t *testing.T) {
	documentation := map[string]string{}
	for name, page := range pages(t) {
		if strings.HasPrefix(name, "docs/") {
			documentation[name] = page
		}
	}
	if t.Logf("%d cases", len(documentation)); len(documentation) < 35 {
		t.Errorf("only %d pages", len(documentation))
	}
	reached := reachable(documentation, start)
	for _, name := range slices.Sorted(maps.Keys(documentation)) {
		if !reached[name] {
			t.Errorf("%s does not list %s, and no index page (README.md) that it lists does", start, name)
		}
	}
}

// TestImagesAreShown: a picture that no page shows is out of date before anybody notices.
func TestImagesAreShown(t *testing.T) {
	var text strings.Builder
	for _, page := range pages(t) {
		text.WriteString(page)
	}
	images := 0
	for _, ending := range []string{".svg", ".png"} {
		files(t, ending, func(name, _ string) {
			if !strings.HasPrefix(name, "docs/images/") {
				return
			}
			if images++; !strings.Contains(text.String(), "images/"+path.Base(name)) {
				t.Errorf("no page shows %s", name)
			}
		})
	}
	if t.Logf("%d cases", images); images < 8 {
		t.Errorf("only %d images", images)
	}
}

// reachable are the pages to which links lead from a page, directly or by way of index pages.
func reachable(all map[string]string, from string) map[string]bool {
	reached, todo := map[string]bool{}, []string{from}
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		page, isPage := all[name]
		if !isPage || reached[name] {
			continue
		}
		reached[name] = true
		if path.Base(name) != "README.md" {
			continue
		}
		for _, found := range link.FindAllStringSubmatch(page, -1) {
			file, _, _ := strings.Cut(found[1], "#")
			todo = append(todo, path.Join(path.Dir(name), file))
		}
	}
	return reached
}

func TestReachableByLinks(t *testing.T) {
	all := map[string]string{
		"docs/README.md":        "[a](a.md#part) [more](how-to/README.md) [away](https://example.com/docs/d.md)",
		"docs/a.md":             "[c](c.md)",
		"docs/how-to/README.md": "[b](b.md) [back](../README.md)",
		"docs/how-to/b.md":      "",
		"docs/c.md":             "[a](a.md)",
		"docs/d.md":             "",
	}
	got := slices.Sorted(maps.Keys(reachable(all, start)))
	if want := []string{"docs/README.md", "docs/a.md", "docs/how-to/README.md", "docs/how-to/b.md"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
