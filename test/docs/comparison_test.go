// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const comparison = "docs/concepts/comparison.md"

var (
	// sourceMark is a link to a source by its short name: [p1].
	sourceMark = regexp.MustCompile(`\[([a-z])([0-9]+)\]`)
	// sourceLine says where a source is, and sourceRow when those with its letter were read.
	sourceLine = regexp.MustCompile(`(?m)^\[([a-z][0-9]+)\]: (\S+)$`)
	sourceRow  = regexp.MustCompile(`(?m)^\| ([a-z]) \| 20[0-9]{2}-[0-9]{2} \| \S.* \|$`)
)

// TestComparisonHasSources: every cell of the comparison names what it was read in, and every source has a link and a date.
func TestComparisonHasSources(t *testing.T) {
	text := rawPages(t)[comparison]
	cells, bare := bareCells(text)
	for _, fault := range append(bare, faultsOfSources(text)...) {
		t.Errorf("%s: %s", comparison, fault)
	}
	if t.Logf("%d cases", cells); cells < 70 {
		t.Errorf("only %d cells", cells)
	}
}

func TestBrokenComparison(t *testing.T) {
	const good = "\n| | Other | Partage |\n|---|---|---|\n| MIG | yes [p1] | [yes](mig.md) |\n\nIt has [p1].\n\n" +
		"| p | 2026-08 | Other v1 |\n\n[p1]: https://example.com/a\n"
	for fault, text := range map[string]string{
		"":                            good,
		"MIG, Other: no source":       strings.Replace(good, "yes [p1]", "yes", 1),
		"MIG, Partage: no source":     strings.Replace(good, "[yes](mig.md)", "yes", 1),
		"p1 has no link":              strings.Replace(good, "[p1]: https://example.com/a", "", 1),
		"p1: no date":                 strings.Replace(good, "2026-08", "lately", 1),
		"p2 is used nowhere":          good + "[p2]: https://example.com/b\n",
		"p1: link to http://a.b: wan": strings.Replace(good, "https://example.com/a", "http://a.b", 1),
	} {
		_, found := bareCells(text)
		found = append(found, faultsOfSources(text)...)
		if fault == "" && len(found) > 0 || fault != "" && (len(found) != 1 || !strings.HasPrefix(found[0], fault)) {
			t.Errorf("%q: %q", fault, found)
		}
	}
}

// bareCells returns how many cells the comparison has, and which of them name no source: another's is a mark, Partage's a page.
func bareCells(text string) (cells int, bare []string) {
	_, table, _ := strings.Cut(text, "\n| | ")
	head, table, _ := strings.Cut("| | "+table, "\n")
	table, _, _ = strings.Cut(table, "\n\n")
	columns := strings.Split(head, " | ")
	for row := range strings.Lines(table) {
		if strings.HasPrefix(row, "|---") {
			continue
		}
		for i, cell := range strings.Split(row, " | ") {
			if i == 0 {
				continue
			}
			cells++
			if !sourceMark.MatchString(cell) && !link.MatchString(cell) {
				bare = append(bare, fmt.Sprintf("%s, %s: no source", strings.Trim(strings.Split(row, " | ")[0], "| "), strings.Trim(columns[i], "| ")))
			}
		}
	}
	return cells, bare
}

// faultsOfSources says which sources that a page marks have no link or no date, and which are not used.
func faultsOfSources(text string) (faults []string) {
	links, dates, used := map[string]string{}, map[string]bool{}, map[string]bool{}
	for _, found := range sourceLine.FindAllStringSubmatch(text, -1) {
		links[found[1]] = found[2]
	}
	for _, found := range sourceRow.FindAllStringSubmatch(text, -1) {
		dates[found[1]] = true
	}
	for _, found := range sourceMark.FindAllStringSubmatch(sourceLine.ReplaceAllString(text, ""), -1) {
		used[found[1]+found[2]] = true
	}
	for _, name := range slices.Sorted(maps.Keys(used)) {
		if err := checkURL(links[name]); links[name] == "" {
			faults = append(faults, name+" has no link")
		} else if err != nil {
			faults = append(faults, fmt.Sprintf("%s: %v", name, err))
		}
		if !dates[name[:1]] {
			faults = append(faults, name+": no date")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(links)) {
		if !used[name] {
			faults = append(faults, name+" is used nowhere")
		}
	}
	return faults
}
