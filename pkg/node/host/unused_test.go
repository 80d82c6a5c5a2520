// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host/hosttest"
	"github.com/partage-dev/partage/test/must"
)

func writeFile(t *testing.T, path string) {
	t.Helper()
	must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte("secret"), 0o600)))
}

// TestUnused: what nobody has open or mapped goes when it is old, whatever it is, and nothing outside.
func TestUnused(t *testing.T) {
	folder := memoryFolder(t, "size=1m,nr_inodes=100")
	at := func(name string) string { return filepath.Join(folder, name) }
	for _, name := range []string{"closed", "open", "mapped", "in/a/b/closed", "mixed/open", "mixed/closed", "watched/closed"} {
		writeFile(t, at(name))
	}
	hosttest.KeepOpen(t, at("open"))
	hosttest.KeepOpen(t, at("mixed/open"))
	mapped := must.Get(os.Open(at("mapped")))(t)
	region, err := unix.Mmap(int(mapped.Fd()), 0, 1, unix.PROT_READ, unix.MAP_SHARED)
	must.Do(t, errors.Join(err, mapped.Close()))
	defer func() { _ = unix.Munmap(region) }()
	outside := filepath.Join(t.TempDir(), "outside")
	writeFile(t, outside)
	must.Do(t, errors.Join(os.Symlink(filepath.Dir(outside), at("in/link")), unix.Mkfifo(at("fifo"), 0o600), os.Mkdir(at("empty"), 0o700)))
	before := hosttest.Files(t, folder)

	for _, test := range []struct {
		age  time.Duration
		want []string
	}{
		{-time.Minute, before},
		{time.Minute, []string{"mapped", "mixed", "mixed/open", "open"}},
		{time.Minute, []string{"mapped", "mixed", "mixed/open", "open"}},
	} {
		must.Get(RemoveUnused(t.Context(), folder, time.Now().Add(test.age)))(t)
		if got := hosttest.Files(t, folder); !slices.Equal(got, test.want) {
			t.Errorf("left:\n%q, want\n%q", got, test.want)
		}
	}
	if data, err := os.ReadFile(outside); err != nil || string(data) != "secret" {
		t.Errorf("outside: %q, %v", data, err)
	}
}

// TestUnusedWithoutEnd: whatever a tenant has built, one look ends, and the room is free again.
func TestUnusedWithoutEnd(t *testing.T) {
	folder := memoryFolder(t, "size=16m,nr_inodes=10000")
	writeFile(t, filepath.Join(folder, strings.Repeat("d/", 500), "file"))
	for i := 0; ; i++ {
		if err := os.Mkdir(filepath.Join(folder, "wide"+strconv.Itoa(i)), 0o700); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil || i > 10000 {
			t.Fatal(err)
		}
	}
	// What is deep is moved to the top, a part in each look.
	for looks := 0; len(hosttest.Files(t, folder)) > 0; looks++ {
		if looks == 500/deepest+1 {
			t.Fatalf("%d are left after %d looks", len(hosttest.Files(t, folder)), looks)
		}
		must.Get(RemoveUnused(t.Context(), folder, time.Now().Add(time.Minute)))(t)
	}
}

const immutable = 0x10 // FS_IMMUTABLE_FL

// setFlags sets those of a file, which is not open afterwards.
func setFlags(t *testing.T, path string, flags int) {
	t.Helper()
	file, err := os.Open(path)
	if err == nil {
		err = errors.Join(unix.IoctlSetPointerInt(int(file.Fd()), unix.FS_IOC_SETFLAGS, flags), file.Close())
	}
	if err != nil {
		t.Skipf("no immutable files here: %v", err)
	}
}

// TestUnusedStays: what is as deep as a program puts it stays where it is while somebody has it open.
func TestUnusedStays(t *testing.T) {
	folder := memoryFolder(t, "size=1m,nr_inodes=200")
	path := filepath.Join(folder, strings.Repeat("d/", 40), "open")
	writeFile(t, path)
	hosttest.KeepOpen(t, path)
	if _, err := RemoveUnused(t.Context(), folder, time.Now().Add(time.Minute)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

// TestUnusedBelow: what is deep goes by the same rules, and what cannot be removed keeps nothing else.
func TestUnusedBelow(t *testing.T) {
	folder := memoryFolder(t, "size=1m,nr_inodes=400")
	deep := filepath.Join(folder, strings.Repeat("d/", 2*deepest))
	writeFile(t, filepath.Join(deep, "open"))
	writeFile(t, filepath.Join(deep, "closed"))
	hosttest.KeepOpen(t, filepath.Join(deep, "open"))
	for i := range 5 {
		writeFile(t, filepath.Join(folder, "file"+strconv.Itoa(i)))
	}
	setFlags(t, filepath.Join(folder, "file2"), immutable)
	defer setFlags(t, filepath.Join(folder, "file2"), 0)
	for range 4 {
		_, _ = RemoveUnused(t.Context(), folder, time.Now().Add(time.Minute))
	}
	left := strings.Join(hosttest.Files(t, folder), " ")
	if !strings.Contains(left, "/open") || strings.Contains(left, "closed") || strings.Contains(left, "file3") || !strings.Contains(left, "file2") {
		t.Errorf("left: %s", left)
	}
}

// TestFileThatHangs: a read of one GPU's file that does not return takes no longer than its caller has, and keeps
// back no read of another's.
func TestFileThatHangs(t *testing.T) {
	proc := t.TempDir()
	const hung, well = "0000:1b:00.0", "0000:2c:00.0"
	file := func(pci string) string { return filepath.Join(proc, "driver/nvidia/gpus", pci, "information") }
	for _, pci := range []string{hung, well} {
		must.Do(t, os.MkdirAll(filepath.Dir(file(pci)), 0o755))
	}
	must.Do(t, errors.Join(unix.Mkfifo(file(hung), 0o600), os.WriteFile(file(well), []byte("Device Minor: \t 3\n"), 0o600)))
	roots := Roots{Proc: proc, Calls: call.New(0)}
	for range 2 { // the second one waits behind the first
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := roots.Within(ctx).GPUMinor(hung)
		cancel()
		if !errors.Is(err, call.ErrNoAnswer) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "on GPU "+hung) {
			t.Errorf("got %v", err)
		}
	}
	if minor, err := roots.Within(t.Context()).GPUMinor(well); minor != 3 || err != nil {
		t.Errorf("another GPU: %d, %v", minor, err)
	}
	if _, err := roots.GPUMinor("0000:3d:00.0"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no GPU: %v", err)
	}
	// It goes on.
	writer, err := os.OpenFile(file(hung), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = writer.WriteString("Device Minor: 1\n")
	must.Do(t, errors.Join(err, writer.Close(), os.Remove(file(hung)), os.WriteFile(file(hung), []byte("Device Minor: 1\n"), 0o600)))
	if minor, err := roots.Within(t.Context()).GPUMinor(hung); minor != 1 || err != nil {
		t.Errorf("afterwards: %d, %v", minor, err)
	}
}
