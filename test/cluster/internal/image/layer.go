// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package image builds container images without a container engine: one layer of files of this machine, written as an
// archive of the OCI image layout. The same input gives the same bytes.
package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Layer is the file system of an image. Its methods remember the first error, which Tar returns.
type Layer struct {
	entries map[string]entry
	err     error
}

type entry struct {
	header tar.Header
	data   []byte
}

// NewLayer returns an empty layer.
func NewLayer() *Layer { return &Layer{entries: map[string]entry{}} }

func (l *Layer) add(dst string, h tar.Header, data []byte) {
	dst = path.Clean("/" + dst)
	if dst == "/" {
		return
	}
	if old, ok := l.entries[dst]; ok && (old.header.Typeflag == tar.TypeDir) != (h.Typeflag == tar.TypeDir) {
		l.fail(fmt.Errorf("image path %s is both a folder and none", dst))
		return
	}
	if parent := path.Dir(dst); parent != "/" {
		if _, ok := l.entries[parent]; !ok {
			l.Dir(parent, 0o755)
		}
	}
	h.Name = strings.TrimPrefix(dst, "/")
	h.Format = tar.FormatPAX
	l.entries[dst] = entry{header: h, data: data}
}

func (l *Layer) fail(err error) {
	if l.err == nil {
		l.err = err
	}
}

// Dir adds a folder; its parents are added as needed, with mode 755.
func (l *Layer) Dir(dst string, mode int64) {
	l.add(dst, tar.Header{Typeflag: tar.TypeDir, Mode: mode}, nil)
}

// Bytes adds a file.
func (l *Layer) Bytes(dst string, mode int64, data []byte) {
	l.add(dst, tar.Header{Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data))}, data)
}

// Link adds a symbolic link.
func (l *Layer) Link(dst, target string) {
	l.add(dst, tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, nil)
}

// File adds a file of this machine; links are followed.
func (l *Layer) File(src, dst string, mode int64) {
	data, err := os.ReadFile(src)
	if err != nil {
		l.fail(fmt.Errorf("add %s to an image: %w", src, err))
		return
	}
	l.Bytes(dst, mode, data)
}

// Spec adds what one command line argument says: SRC:DST[:MODE], dir:DST[:MODE] or link=TARGET:DST. MODE is octal,
// 755 where none is given.
func (l *Layer) Spec(arg string) {
	parts := strings.Split(arg, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		l.fail(fmt.Errorf("image file %q: want SRC:DST[:MODE], dir:DST[:MODE] or link=TARGET:DST", arg))
		return
	}
	mode := int64(0o755)
	if len(parts) == 3 {
		m, err := strconv.ParseInt(parts[2], 8, 64)
		if err != nil || m < 0 || m > 0o7777 {
			l.fail(fmt.Errorf("image file %q: mode %q is not an octal file mode", arg, parts[2]))
			return
		}
		mode = m
	}
	target, isLink := strings.CutPrefix(parts[0], "link=")
	switch {
	case isLink:
		l.Link(parts[1], target)
	case parts[0] == "dir":
		l.Dir(parts[1], mode)
	default:
		l.File(parts[0], parts[1], mode)
	}
}

// Closure adds the shared libraries, loader included, that the ELF file src needs, where the loader will look for them.
// A static file, or one that is not ELF, needs none.
func (l *Layer) Closure(r Resolver, src string) {
	libraries, err := r.Closure(src)
	if err != nil {
		l.fail(err)
		return
	}
	for _, lib := range libraries {
		l.File(r.host(lib), lib, 0o755)
	}
}

// Closures adds what every file of the layer needs that was read from this machine; see Closure.
func (l *Layer) Closures(r Resolver, args []string) {
	for _, arg := range args {
		if src, _, ok := strings.Cut(arg, ":"); ok && src != "dir" && !strings.HasPrefix(src, "link=") {
			l.Closure(r, src)
		}
	}
}

// Tar returns the layer as a tar file: sorted, owned by root, without times.
func (l *Layer) Tar() ([]byte, error) {
	if l.err != nil {
		return nil, l.err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, dst := range slices.Sorted(maps.Keys(l.entries)) {
		e := l.entries[dst]
		if e.header.Typeflag == tar.TypeDir {
			e.header.Name += "/"
		}
		if err := w.WriteHeader(&e.header); err != nil {
			return nil, fmt.Errorf("write image path %s: %w", dst, err)
		}
		if _, err := w.Write(e.data); err != nil {
			return nil, fmt.Errorf("write image path %s: %w", dst, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("write image layer: %w", err)
	}
	return out.Bytes(), nil
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return !errors.Is(err, fs.ErrNotExist)
}
