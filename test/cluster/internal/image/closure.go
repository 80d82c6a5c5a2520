// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bufio"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Resolver finds shared libraries as the dynamic loader does (ld.so(8)): run path, folders of ld.so.conf, defaults.
// The environment and the loader's cache play no part.
type Resolver struct {
	Root string // file system to look in; empty is the machine's own
}

type dynamic struct {
	file    string
	class   elf.Class
	machine elf.Machine
	interp  string
	needed  []string
	runPath []string
}

var errNotELF = errors.New("not an ELF file")

// Closure returns the absolute paths, below Root, of the loader and of every library that file and its libraries need, sorted.
// file is a path of the machine.
func (r Resolver) Closure(file string) ([]string, error) {
	first, err := r.read(file)
	if errors.Is(err, errNotELF) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the libraries of %s: %w", file, err)
	}
	defaults, err := r.defaults(first)
	if err != nil {
		return nil, fmt.Errorf("find the libraries of %s: %w", file, err)
	}
	found := map[string]bool{}
	loaders := map[string]string{} // by file name
	queue := []*dynamic{first}
	for len(queue) > 0 {
		d := queue[0]
		queue = queue[1:]
		if d.interp != "" {
			found[d.interp] = true
			loaders[filepath.Base(d.interp)] = d.interp
		}
		for _, name := range d.needed {
			lib, next, err := r.find(name, d, slices.Concat(d.runPath, defaults))
			if err != nil {
				return nil, fmt.Errorf("find the libraries of %s: %w", file, err)
			}
			if !found[lib] {
				found[lib] = true
				queue = append(queue, next)
			}
		}
	}
	var all []string
	for lib := range found {
		// Libraries need the loader as well, but it is there already, from its own place.
		if loader := loaders[filepath.Base(lib)]; loader == "" || loader == lib {
			all = append(all, lib)
		}
	}
	slices.Sort(all)
	return all, nil
}

// Library returns the path, below Root, of the named library for the same kind of program as like, which is a path of the machine.
func (r Resolver) Library(name, like string) (string, error) {
	d, err := r.read(like)
	if err != nil {
		return "", fmt.Errorf("find %s for %s: %w", name, like, err)
	}
	defaults, err := r.defaults(d)
	if err != nil {
		return "", fmt.Errorf("find %s for %s: %w", name, like, err)
	}
	lib, _, err := r.find(name, d, defaults)
	return lib, err
}

func (r Resolver) find(name string, by *dynamic, dirs []string) (string, *dynamic, error) {
	if strings.Contains(name, "/") {
		d, err := r.read(r.host(name))
		return name, d, err
	}
	for _, dir := range dirs {
		lib := filepath.Join(dir, name)
		if !exists(r.host(lib)) {
			continue
		}
		d, err := r.read(r.host(lib))
		if errors.Is(err, errNotELF) || (err == nil && (d.class != by.class || d.machine != by.machine)) {
			continue // of another architecture: the loader goes on as well
		}
		return lib, d, err
	}
	return "", nil, fmt.Errorf("library %s, needed by %s, is in none of %s", name, by.file, strings.Join(dirs, ", "))
}

func (r Resolver) host(path string) string { return filepath.Join(r.Root, path) }

func (r Resolver) read(file string) (*dynamic, error) {
	f, err := elf.Open(file)
	var format *elf.FormatError
	if errors.As(err, &format) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // too short for one
		return nil, errNotELF
	}
	if err != nil {
		return nil, err //nolint:wrapcheck // says which file
	}
	defer f.Close()
	d := &dynamic{file: file, class: f.Class, machine: f.Machine}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b := make([]byte, p.Filesz)
			if _, err := p.ReadAt(b, 0); err != nil {
				return nil, fmt.Errorf("read the loader's name: %w", err)
			}
			d.interp = string(bytes.TrimRight(b, "\x00"))
		}
	}
	if f.SectionByType(elf.SHT_DYNAMIC) == nil {
		return d, nil
	}
	if d.needed, err = f.ImportedLibraries(); err != nil {
		return nil, fmt.Errorf("read needed libraries: %w", err)
	}
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		paths, err := f.DynString(tag)
		if err != nil {
			return nil, fmt.Errorf("read run path: %w", err)
		}
		for _, p := range paths {
			dir := strings.TrimPrefix(filepath.Dir(file), r.Root)
			origin := strings.NewReplacer("${ORIGIN}", dir, "$ORIGIN", dir)
			d.runPath = append(d.runPath, filepath.SplitList(origin.Replace(p))...)
		}
		if len(d.runPath) > 0 {
			break
		}
	}
	return d, nil
}

func (r Resolver) defaults(d *dynamic) ([]string, error) {
	dirs, err := r.configured("/etc/ld.so.conf", 0)
	if err != nil {
		return nil, err
	}
	if triplet := triplets[d.machine]; triplet != "" { // built into Debian's loader
		dirs = append(dirs, "/lib/"+triplet, "/usr/lib/"+triplet)
	}
	if d.class == elf.ELFCLASS64 {
		dirs = append(dirs, "/lib64", "/usr/lib64")
	}
	return append(dirs, "/lib", "/usr/lib"), nil
}

var triplets = map[elf.Machine]string{elf.EM_X86_64: "x86_64-linux-gnu", elf.EM_AARCH64: "aarch64-linux-gnu"}

const maxIncludes = 8

// configured reads the folders of ld.so.conf and of what it includes.
func (r Resolver) configured(conf string, depth int) ([]string, error) {
	if depth > maxIncludes {
		return nil, fmt.Errorf("%s: includes nested more than %d deep", conf, maxIncludes)
	}
	b, err := os.ReadFile(r.host(conf))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the loader's folders: %w", err)
	}
	var dirs []string
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		text, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(text)
		switch {
		case len(words) == 2 && words[0] == "include":
			more, err := r.included(words[1], conf, depth)
			if err != nil {
				return nil, err
			}
			dirs = append(dirs, more...)
		case len(words) == 1 && strings.HasPrefix(words[0], "/"):
			dirs = append(dirs, words[0])
		}
	}
	return dirs, nil
}

func (r Resolver) included(pattern, conf string, depth int) ([]string, error) {
	if !filepath.IsAbs(pattern) {
		pattern = filepath.Join(filepath.Dir(conf), pattern)
	}
	files, err := filepath.Glob(r.host(pattern))
	if err != nil {
		return nil, fmt.Errorf("%s includes %s: %w", conf, pattern, err)
	}
	var dirs []string
	for _, f := range files {
		rel, err := filepath.Rel("/"+r.Root, "/"+f)
		if err != nil {
			return nil, fmt.Errorf("%s includes %s: %w", conf, f, err)
		}
		more, err := r.configured("/"+rel, depth+1)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, more...)
	}
	return dirs, nil
}
