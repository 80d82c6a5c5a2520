// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// TestRemoveTmpfs: a process that keeps a folder and a file of a file system in memory holds next to nothing, or what there was room
// for if it cannot be emptied.
func TestRemoveTmpfs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	const content, room = 1 << 20, 4 << 20
	for name, test := range map[string]struct {
		keep func(t *testing.T, file *os.File)
		most int64
	}{
		"a file": {func(*testing.T, *os.File) {}, 4096},
		"an unlinked file": {func(t *testing.T, file *os.File) {
			must.Do(t, os.Remove(file.Name()))
		}, room},
		"a file with a lease": {func(t *testing.T, file *os.File) {
			must.Get(unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK))(t)
		}, room},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "memory")
			must.Do(t, MountTmpfs("test", path, room, ""))
			inside := filepath.Join(path, "a/b/content")
			must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(inside), 0o755), os.WriteFile(inside, make([]byte, content), 0o600)))
			folder := must.Get(os.Open(filepath.Join(path, "a")))(t)
			defer func() { _ = folder.Close() }()
			file := must.Get(os.OpenFile(inside, os.O_RDWR, 0))(t)
			defer func() { _ = file.Close() }()
			test.keep(t, file)
			if kept, err := EmptyTmpfs(t.Context(), path); !kept || err != nil {
				t.Errorf("kept: %v, %v", kept, err)
			}
			must.Do(t, RemoveTmpfs(path))
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder is still there: %v", err)
			}
			_, _ = file.WriteAt(make([]byte, 2*room), 0)
			if fd, err := unix.Openat(int(folder.Fd()), "more", unix.O_CREAT|unix.O_WRONLY, 0o600); err == nil {
				_ = unix.Close(fd)
				t.Error("files can be made")
			}
			var is unix.Statfs_t
			must.Do(t, unix.Fstatfs(int(folder.Fd()), &is))
			if used := int64(is.Blocks-is.Bfree) * is.Bsize; used > test.most {
				t.Errorf("%d KiB are kept, want %d at most", used>>10, test.most>>10)
			}
		})
	}
}

// TestEmptyTmpfs: nothing is kept when nobody has anything open, and what is no file system in memory is left alone.
func TestEmptyTmpfs(t *testing.T) {
	path := memoryFolder(t, manyFiles)
	writeFile(t, filepath.Join(path, "a/b/file"))
	if kept, err := EmptyTmpfs(t.Context(), path); kept || err != nil {
		t.Errorf("kept: %v, %v", kept, err)
	}
	empty(t, path)
	if _, err := EmptyTmpfs(t.Context(), "/proc/self"); err == nil {
		t.Error("no error")
	}
}

func TestFileContext(t *testing.T) {
	const enabled, none = "nodev\tsysfs\nnodev\tselinuxfs\n\text4\n", "nodev\tsysfs\n\text4\n"
	for name, test := range map[string]struct {
		setting, filesystems, current string
		want                          string
	}{
		"with SELinux":         {SELinuxAuto, enabled, "system_u:system_r:spc_t:s0\x00", containerFiles},
		"by default":           {"", enabled, "system_u:system_r:spc_t:s0-s0:c0.c1023", containerFiles},
		"without a policy":     {SELinuxAuto, enabled, "kernel", ""},
		"with AppArmor":        {SELinuxAuto, none, "unconfined\n", ""},
		"on a simulated node":  {SELinuxAuto, "", "", ""},
		"not wanted":           {SELinuxNone, enabled, "system_u:system_r:spc_t:s0", ""},
		"another one":          {"system_u:object_r:gpu_t:s0:c1,c2", none, "", "system_u:object_r:gpu_t:s0:c1,c2"},
		"another with SELinux": {"system_u:object_r:gpu_t", enabled, "system_u:system_r:spc_t:s0", "system_u:object_r:gpu_t"},
	} {
		t.Run(name, func(t *testing.T) {
			root, roots := tree(t)
			for path, content := range map[string]string{"proc/filesystems": test.filesystems, "proc/self/attr/current": test.current} {
				if content != "" {
					write(t, root, path, content)
				}
			}
			if got, err := roots.FileContext(test.setting); err != nil || got != test.want || !ValidSELinux(got) && got != "" {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
		})
	}
	for _, setting := range []string{"", "Auto", "container_file_t", `system_u:object_r:t:s0",size=1`, "a:b:c d", "a::c:s0"} {
		if ValidSELinux(setting) {
			t.Errorf("%q is valid", setting)
		}
	}
}

// TestContextThatDoesNotExist: neither a kernel without SELinux nor a policy knows it.
func TestContextThatDoesNotExist(t *testing.T) {
	path := filepath.Join(memoryFolder(t, manyFiles), "labelled")
	err := MountTmpfs("test", path, 1<<20, "nobody_u:nothing_r:nowhere_t:s0")
	if errors.Is(err, os.ErrPermission) {
		t.Skip("mounts need root")
	}
	if !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), `the SELinux context "nobody_u:nothing_r:nowhere_t:s0"`) || !strings.Contains(err.Error(), "SELINUX_CONTEXT") {
		t.Errorf("got %v", err)
	}
}
