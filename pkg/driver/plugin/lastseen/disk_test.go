// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lastseen

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDiskThatTakesNothing: what was written before stays, each attempt fails in the same
// words, and once the disk takes it the file is written.
func TestDiskThatTakesNothing(t *testing.T) {
	for name, test := range map[string]struct {
		begin, end func(t *testing.T, dir string)
		want       error
	}{
		"full": {
			func(t *testing.T, dir string) { t.Helper(); fill(t, filepath.Join(dir, "fill")) },
			func(t *testing.T, dir string) { t.Helper(); must(t, os.Remove(filepath.Join(dir, "fill"))) },
			unix.ENOSPC,
		},
		"read-only": {
			func(t *testing.T, dir string) { t.Helper(); must(t, remount(dir, unix.MS_RDONLY)) },
			func(t *testing.T, dir string) { t.Helper(); must(t, remount(dir, 0)) },
			unix.EROFS,
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("disk", dir, "tmpfs", 0, "size=64k"); err != nil {
				t.Skipf("cannot mount: %v", err)
			}
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			f := New(dir, "1")
			must(t, f.Write(node("0000:1b:00.0"), nil))

			test.begin(t, dir)
			both := node("0000:1b:00.0", "0000:28:00.0")
			first := f.Write(both, nil)
			if !errors.Is(first, test.want) || !strings.Contains(first.Error(), filepath.Join(dir, FileName)) {
				t.Errorf("got %v", first)
			}
			if again := f.Write(both, nil); again == nil || again.Error() != first.Error() {
				t.Errorf("first %v, then %v", first, again)
			}
			if seen, _, err := New(dir, "1").Read(); err != nil || addresses(seen) != "0000:1b:00.0" {
				t.Errorf("read %q, %v", addresses(seen), err)
			}

			test.end(t, dir)
			must(t, f.Write(both, nil))
			if seen, _, err := New(dir, "1").Read(); err != nil || addresses(seen) != "0000:1b:00.0 0000:28:00.0" {
				t.Errorf("afterwards %q, %v", addresses(seen), err)
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
				t.Errorf("the folder has %v, %v", entries, err)
			}
		})
	}
}

func remount(dir string, flags uintptr) error {
	return unix.Mount("disk", dir, "tmpfs", unix.MS_REMOUNT|flags, "size=64k")
}

// fill writes until there is no space.
func fill(t *testing.T, path string) {
	t.Helper()
	err := os.WriteFile(path, make([]byte, 1<<20), 0o600)
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("got %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
