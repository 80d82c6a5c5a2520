// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

const loader = "/lib64/ld-linux-x86-64.so.2"

// machine is a small file system with programs and libraries.
func machine(t *testing.T) Resolver {
	t.Helper()
	root := t.TempDir()
	lib := "/lib/x86_64-linux-gnu/"
	amd, arm := elf.EM_X86_64, elf.EM_AARCH64
	for path, o := range map[string]object{
		"/bin/simple":                {machine: amd, interp: loader, needed: []string{"libc.so.6"}},
		"/bin/static":                {machine: amd},
		"/bin/deep":                  {machine: amd, interp: loader, needed: []string{"liba.so.1", "libconf.so.1"}},
		"/opt/app/bin/origin":        {machine: amd, interp: loader, needed: []string{"libown.so"}, runPath: "$ORIGIN/../lib"},
		"/bin/broken":                {machine: amd, interp: loader, needed: []string{"libnone.so.1"}},
		loader:                       {machine: amd},
		lib + "ld-linux-x86-64.so.2": {machine: amd},
		lib + "libc.so.6":            {machine: amd, interp: loader, needed: []string{"ld-linux-x86-64.so.2"}},
		lib + "libm.so.6":            {machine: amd, needed: []string{"ld-linux-x86-64.so.2", "libc.so.6"}},
		lib + "liba.so.1":            {machine: amd, needed: []string{"libb.so.1", "libc.so.6"}},
		lib + "libb.so.1":            {machine: amd, needed: []string{"liba.so.1", "libc.so.6"}}, // a cycle
		"/usr/local/lib/liba.so.1":   {machine: arm},                                             // of another architecture, in an earlier folder
		"/srv/conf/libconf.so.1":     {machine: amd, needed: []string{"libc.so.6"}},
		"/opt/app/lib/libown.so":     {machine: amd, needed: []string{"libc.so.6"}},
	} {
		o.write(t, filepath.Join(root, path))
	}
	put(t, filepath.Join(root, "/bin/script"), []byte("#!/bin/sh\n"))
	put(t, filepath.Join(root, "/etc/ld.so.conf"), []byte("# first\ninclude ld.so.conf.d/*.conf\n"))
	put(t, filepath.Join(root, "/etc/ld.so.conf.d/a.conf"), []byte("/usr/local/lib\n/srv/conf # own\n"))
	return Resolver{Root: root}
}

func TestClosure(t *testing.T) {
	r := machine(t)
	const c = "/lib/x86_64-linux-gnu/libc.so.6"
	tests := map[string][]string{
		"/bin/script":                     nil,
		"/bin/static":                     nil,
		"/bin/simple":                     {c, loader},
		"/lib/x86_64-linux-gnu/libm.so.6": {c, loader},
		"/bin/deep":                       {"/lib/x86_64-linux-gnu/liba.so.1", "/lib/x86_64-linux-gnu/libb.so.1", c, loader, "/srv/conf/libconf.so.1"},
		"/opt/app/bin/origin":             {c, loader, "/opt/app/lib/libown.so"},
	}
	for file, want := range tests {
		t.Run(filepath.Base(file), func(t *testing.T) {
			got, err := r.Closure(r.host(file))
			if err != nil {
				t.Fatal(err)
			}
			for i := range got {
				got[i] = filepath.Clean(got[i])
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	_, err := r.Closure(r.host("/bin/broken"))
	if err == nil || !strings.Contains(err.Error(), "libnone.so.1") || !strings.Contains(err.Error(), "/srv/conf") {
		t.Errorf("err = %v, want the library and the folders looked in", err)
	}
}

func TestLayer(t *testing.T) {
	src := filepath.Join(t.TempDir(), "src")
	put(t, src, []byte("text"))
	l := NewLayer()
	for _, arg := range []string{src + ":/usr/bin/tool", src + ":/etc/conf:644", "dir:/tmp:1777", "link=tool:/usr/bin/other"} {
		l.Spec(arg)
	}
	b, err := l.Tar()
	if err != nil {
		t.Fatal(err)
	}
	type file struct {
		Name string
		Mode int64
		Link string
		Data string
	}
	want := []file{
		{Name: "etc/", Mode: 0o755},
		{Name: "etc/conf", Mode: 0o644, Data: "text"},
		{Name: "tmp/", Mode: 0o1777},
		{Name: "usr/", Mode: 0o755},
		{Name: "usr/bin/", Mode: 0o755},
		{Name: "usr/bin/other", Mode: 0o777, Link: "tool"},
		{Name: "usr/bin/tool", Mode: 0o755, Data: "text"},
	}
	var got []file
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, file{h.Name, h.Mode, h.Linkname, string(data)})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestLayerRefuses(t *testing.T) {
	src := filepath.Join(t.TempDir(), "src")
	put(t, src, nil)
	for name, args := range map[string][]string{
		"no destination": {src}, "empty": {":/x"}, "mode": {src + ":/x:9"}, "no such file": {"/no/such/file:/x"},
		"file and folder": {src + ":/x", src + ":/x/y", "dir:/x"},
	} {
		l := NewLayer()
		for _, a := range args {
			l.Spec(a)
		}
		if _, err := l.Tar(); err == nil {
			t.Errorf("%s: %v was accepted", name, args)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) []byte {
		l := NewLayer()
		l.Bytes("/hello", 0o644, []byte("hello"))
		path := filepath.Join(dir, name)
		if err := (Image{Ref: "registry.local/a/b:1", Entrypoint: []string{"/hello"}, Layer: l}).Write(path); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	first := write("one.tar")
	if !bytes.Equal(first, write("two.tar")) {
		t.Error("the same image has different bytes")
	}
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(first)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	blob := func(d v1.Descriptor, into any) {
		b := files["blobs/sha256/"+d.Digest.Encoded()]
		if int64(len(b)) != d.Size {
			t.Fatalf("%s has %d bytes, want %d", d.Digest, len(b), d.Size)
		}
		if into != nil {
			if err := json.Unmarshal(b, into); err != nil {
				t.Fatal(err)
			}
		}
	}
	var index v1.Index
	if err := json.Unmarshal(files["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	var manifest v1.Manifest
	blob(index.Manifests[0], &manifest)
	var config v1.Image
	blob(manifest.Config, &config)
	blob(manifest.Layers[0], nil)
	if got := index.Manifests[0].Annotations[nameAnnotation]; got != "registry.local/a/b:1" {
		t.Errorf("name %q", got)
	}
	if config.OS != "linux" || config.Architecture == "" || config.RootFS.DiffIDs[0] != manifest.Layers[0].Digest {
		t.Errorf("config %+v", config)
	}
	for _, ref := range []string{"", "busybox", "a/b", "A/b:1", "a/b:"} {
		if err := (Image{Ref: ref, Layer: NewLayer()}).Write(filepath.Join(dir, "x.tar")); err == nil {
			t.Errorf("reference %q was accepted", ref)
		}
	}
}
