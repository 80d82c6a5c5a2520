// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// programFolders are where distributions and driver containers keep the driver's
// programs, in order of preference.
var programFolders = []string{"usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "usr/local/nvidia/bin", "opt/bin"}

// loaders are the dynamic loaders of a complete system.
var loaders = []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"}

// Program is a program of the driver.
type Program struct {
	// Root is the folder in which it runs, by chroot. Empty where the driver root
	// has only the driver and the C library is this process's.
	Root string
	// Path is absolute, within Root.
	Path string
	// Env is what it needs in its environment.
	Env []string
}

// Program finds a program of the driver, for example "nvidia-smi". A driver root
// that is a system of its own is entered, because its programs need its C library.
// The error wraps fs.ErrNotExist when there is no such program.
func (r Roots) Program(name string) (Program, error) {
	root := r.Complete().Driver
	for _, folder := range programFolders {
		path := filepath.Join(root, folder, name)
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Program{}, fmt.Errorf("look for %s: %w", name, err)
		}
		if info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return r.program(root, "/"+filepath.Join(folder, name)), nil
		}
	}
	return Program{}, fmt.Errorf("no %s in the program folders of driver root %q: %w", name, root, fs.ErrNotExist)
}

func (r Roots) program(root, path string) Program {
	if filepath.Clean(root) == "/" {
		return Program{Path: path, Env: []string{"PATH=" + strings.Join(within("/", programFolders), ":")}}
	}
	for _, loader := range loaders {
		if _, err := os.Lstat(filepath.Join(root, loader)); err == nil {
			return Program{Root: root, Path: path, Env: []string{"PATH=" + strings.Join(within("/", programFolders), ":")}}
		}
	}
	return Program{
		Path: filepath.Join(root, path),
		Env: []string{
			"PATH=" + strings.Join(within(root, programFolders), ":"),
			"LD_LIBRARY_PATH=" + strings.Join(within(root, libraryFolders), ":"),
		},
	}
}

func within(root string, folders []string) []string {
	paths := make([]string, len(folders))
	for i, folder := range folders {
		paths[i] = filepath.Join(root, folder)
	}
	return paths
}

// Command runs the program. When ctx ends, it and what it started are killed.
func (p Program) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.Path, args...)
	cmd.Env = p.Env
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.Root, Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}
