// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command notices prints the licences and notices of all that the named packages link, as go
// list finds it for GOOS, GOARCH, CGO_ENABLED and GOFLAGS. It fails if a licence is missing,
// unknown or not one of those that Partage may ship.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// allowed are the licences of the CNCF's list that are in use here. Each asks only that its text is passed on.
var allowed = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"}

// exceptions are modules with another licence as well, by licence. MPL-2.0 also asks to say where the source is: unchanged, at
// Go's module proxy, under the version that is printed.
var exceptions = map[string][]string{
	"MPL-2.0": {"github.com/cyphar/filepath-securejoin"},
}

// recognised is how much of a licence's text has to be known. The rest names who holds the copyright.
const recognised = 75

var (
	licence = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([.-].*)?$`)
	notice  = regexp.MustCompile(`(?i)^(notice|patents|copyright)([.-].*)?$`)
	source  = regexp.MustCompile(`\.(go|sh|py)$`)
)

// module is what go list says of one.
type module struct {
	Path, Version, Dir string
	Main               bool
	Replace            *module
}

type goPackage struct {
	Dir      string
	Standard bool
	Module   *module
}

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "notices:", err)
		os.Exit(1)
	}
}

func run(packages []string, out io.Writer) error {
	if len(packages) == 0 {
		return errors.New("want the packages of programs, got none")
	}
	linked, err := list(packages)
	if err != nil {
		return err
	}
	texts, err := collect(linked)
	if err != nil {
		return err
	}
	return write(texts, out)
}

// list returns what the packages link: by module the folders that have packages, with Go's own library as module "Go".
func list(packages []string) (map[module][]string, error) {
	cmd := exec.Command("go", append([]string{"list", "-deps", "-json=Dir,Standard,Module"}, packages...)...)
	cmd.Stderr = os.Stderr
	listed, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list %v: %w", packages, err)
	}
	root, err := exec.Command("go", "env", "GOROOT", "GOVERSION").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	env := strings.Fields(string(root))
	library := module{Path: "Go", Version: env[1], Dir: env[0]}

	linked := map[module][]string{library: {library.Dir}}
	for decoder := json.NewDecoder(bytes.NewReader(listed)); ; {
		var p goPackage
		switch err := decoder.Decode(&p); {
		case errors.Is(err, io.EOF):
			return linked, nil
		case err != nil:
			return nil, fmt.Errorf("go list %v: %w", packages, err)
		case p.Standard || p.Module == nil || p.Module.Main:
			continue
		}
		m := *p.Module
		if m.Replace != nil {
			m.Dir = m.Replace.Dir
			m.Replace = nil
		}
		linked[m] = append(linked[m], p.Dir)
	}
}

// collect returns what the modules want to be passed on: by text who wants it.
func collect(linked map[module][]string) (map[string][]string, error) {
	texts := map[string][]string{}
	var refused []error
	for m, dirs := range linked {
		files, licences := map[string]bool{}, 0
		for _, dir := range dirs {
			// A folder may have a licence of its own, beside that of its module.
			for ; len(dir) >= len(m.Dir); dir = filepath.Dir(dir) {
				entries, err := os.ReadDir(dir)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", m.Path, err)
				}
				for _, e := range entries {
					if !e.IsDir() && !source.MatchString(e.Name()) && (licence.MatchString(e.Name()) || notice.MatchString(e.Name())) {
						files[filepath.Join(dir, e.Name())] = true
					}
				}
			}
		}
		for file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", m.Path, err)
			}
			if licence.MatchString(filepath.Base(file)) {
				licences++
				if err := check(m.Path, text); err != nil {
					refused = append(refused, fmt.Errorf("%s %s: %s: %w", m.Path, m.Version, strings.TrimPrefix(file, m.Dir+"/"), err))
				}
			}
			texts[string(text)] = append(texts[string(text)], m.Path+" "+m.Version)
		}
		if licences == 0 {
			refused = append(refused, fmt.Errorf("%s %s has no licence", m.Path, m.Version))
		}
	}
	return texts, errors.Join(refused...)
}

// check returns an error if a module may not be shipped under a licence.
func check(path string, text []byte) error {
	found := licensecheck.Scan(text)
	if found.Percent < recognised {
		return fmt.Errorf("%.0f %% of the text is that of a known licence, want %d %%", found.Percent, recognised)
	}
	for _, match := range found.Match {
		if !slices.Contains(allowed, match.ID) && !slices.Contains(exceptions[match.ID], path) {
			return fmt.Errorf("the licence is %s, want one of %s", match.ID, strings.Join(allowed, ", "))
		}
	}
	return nil
}

// write prints every text once, with those who want it, in an order that does not change.
func write(texts map[string][]string, out io.Writer) error {
	type entry struct{ who, text string }
	var entries []entry
	for text, who := range texts {
		slices.Sort(who)
		entries = append(entries, entry{strings.Join(slices.Compact(who), "\n"), text})
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.who+a.text, b.who+b.text) })
	line := strings.Repeat("=", 80)
	all := "This program contains software of others, unchanged. Its source is what Go's module proxy has under the name and\n" +
		"the version that stand above each licence.\n"
	for _, e := range entries {
		all += "\n" + line + "\n" + e.who + "\n" + line + "\n\n" + strings.TrimSpace(e.text) + "\n"
	}
	_, err := io.WriteString(out, all)
	return err
}
