// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sizes

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

// Repository is what Read has measured.
type Repository struct {
	Parts map[Part]Lines
	// Rooms are the folders of pkg and cmd, without tests and generated code, with what is below them.
	Rooms map[string]Lines
	// Words of pages and of the top-level files, without what is generated.
	Words int
	Cases []Cases
	// Began is when the last make test began; Steps and Suites how long its parts took.
	Began         string
	Steps, Suites []Step
}

// Read measures the named files of the repository below top, and reads what make test left in output.
func Read(top string, names []string, output string) (*Repository, error) {
	r := &Repository{Parts: map[Part]Lines{}, Rooms: map[string]Lines{}}
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(top, name))
		if err != nil {
			return nil, fmt.Errorf("measure %s: %w", name, err)
		}
		r.add(name, string(data))
	}
	logs, err := filepath.Glob(filepath.Join(output, "test-*.log"))
	if err != nil {
		return nil, fmt.Errorf("find the logs of make test: %w", err)
	}
	for _, log := range logs {
		data, err := os.ReadFile(log)
		if err != nil {
			return nil, fmt.Errorf("count cases: %w", err)
		}
		r.Cases = append(r.Cases, casesIn(string(data))...)
		r.Suites = append(r.Suites, suitesIn(string(data))...)
	}
	steps, err := os.ReadFile(filepath.Join(output, "steps"))
	if err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("read how long make test took: %w", err)
	}
	began, all, err := stepsIn(string(steps))
	if r.Steps = all; len(all) > 0 {
		r.Began = began.UTC().Format("2006-01-02 15:04 UTC")
	}
	return r, err
}

func (r *Repository) add(name, content string) {
	if path.Ext(name) == ".md" {
		r.Words += prose(content)
		return
	}
	part := partOf(name, content)
	if part == "" {
		return
	}
	lines := count(content)
	grow(r.Parts, part, lines)
	if part == Tests || part == Generated {
		return
	}
	for folder := path.Dir(name); strings.HasPrefix(folder, "pkg/") || strings.HasPrefix(folder, "cmd/"); folder = path.Dir(folder) {
		grow(r.Rooms, folder, lines)
	}
}

func grow[K comparable](m map[K]Lines, key K, by Lines) {
	l := m[key]
	l.add(by)
	m[key] = l
}

// Print writes the report. Rooms below min lines, with comments and blank ones, are left out.
func (r *Repository) Print(w io.Writer, min int) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, l Lines) {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d %%\t\n", name, l.Code, l.Comment, l.Blank, l.All(), 100*l.Comment/max(1, l.All()))
	}
	fmt.Fprint(t, "lines\tcode\tcomment\tblank\tall\tcomments\t\n")
	for _, p := range parts {
		row(string(p), r.Parts[p])
	}
	fmt.Fprintf(t, "\t\t\t\t\t\t\nroom\tcode\tcomment\tblank\tall\tcomments\t\n")
	for _, name := range slices.Sorted(maps.Keys(r.Rooms)) {
		if l := r.Rooms[name]; l.All() >= min {
			row(name, l)
		}
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("print sizes: %w", err)
	}
	fmt.Fprintf(w, "\nwords of docs, without what is generated: %d\n", r.Words)
	r.printCases(w)
	return r.printSteps(w)
}

// printCases adds up what the tests say, with the largest by name.
func (r *Repository) printCases(w io.Writer) {
	byTest, total := map[string]int{}, 0
	for _, c := range r.Cases {
		test, _, _ := strings.Cut(c.Test, "/")
		byTest[test] += c.Count
		total += c.Count
	}
	fmt.Fprintf(w, "cases that enumerations ran: %d in %d tests", total, len(byTest))
	names := slices.SortedFunc(maps.Keys(byTest), func(a, b string) int {
		return cmp.Or(cmp.Compare(byTest[b], byTest[a]), cmp.Compare(a, b))
	})
	for i, name := range names[:min(12, len(names))] {
		separator := ", "
		if i == 0 {
			separator = "; most: "
		}
		fmt.Fprintf(w, "%s%s %d", separator, name, byTest[name])
	}
	fmt.Fprintln(w)
}

func (r *Repository) printSteps(w io.Writer) error {
	if len(r.Steps) == 0 {
		_, err := fmt.Fprintln(w, "seconds by suite: unknown, since no make test has passed here")
		return err
	}
	fmt.Fprintf(w, "\nmake test of %s\n", r.Began)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	total := 0.0
	for _, s := range r.Steps {
		total += s.Took.Seconds()
		fmt.Fprintf(t, "%s\t%.0f s\t\n", s.Name, s.Took.Seconds())
	}
	fmt.Fprintf(t, "all\t%.0f s\t\n", total)
	for _, s := range r.Suites {
		fmt.Fprintf(t, "%s\t%.0f s\t\n", s.Name, s.Took.Seconds())
	}
	return t.Flush()
}
