// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFind(t *testing.T) {
	root := t.TempDir()
	touch := func(path string) string {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	library := touch("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05")
	tool := touch("usr/bin/nvidia-smi")
	alone := touch("tool")
	find := func(self string) string {
		t.Helper()
		l, err := FindFor(self)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v", self, err)
			}
			return "none"
		}
		return strings.ReplaceAll(l.State+" "+l.Root, root, "R")
	}
	check := func(when, self, want string) {
		t.Helper()
		if got := find(self); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	t.Setenv("GPUSIM_STATE", "")
	check("nothing there", library, "none")
	link := touch("usr/lib/x86_64-linux-gnu/libnvidia-gpusim-state.so.580.95.05")
	check("library, link only", library, "R"+strings.TrimPrefix(link, root)+" R")
	check("tool, link only", tool, "R"+strings.TrimPrefix(link, root)+" R")
	touch(RelativePath)
	check("library", library, "R/var/lib/gpusim/state R")
	check("tool", tool, "R/var/lib/gpusim/state R")
	t.Setenv("GPUSIM_STATE", "/elsewhere/state")
	check("given, not in a root", library, "/elsewhere/state R")
	check("given, tool alone", alone, "/elsewhere/state /")
	t.Setenv("GPUSIM_STATE", "/other"+"/"+RelativePath)
	check("given, in a root", library, "/other/var/lib/gpusim/state /other")
}
