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
	unusable := ""
	for _, folder := range programFolders {
		path := filepath.Join(folder, name)
		file, info, err := statIn(root, path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Program{}, fmt.Errorf("look for %s in driver root %q: %w", name, root, err)
		}
		if info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return program(root, path, file)
		}
		unusable += fmt.Sprintf(", and %s cannot be executed", file)
	}
	return Program{}, fmt.Errorf("no %s in the program folders of driver root %q%s: %w", name, root, unusable, fs.ErrNotExist)
}

// program is the one at this path in the root. The file is where that leads to.
func program(root, path, file string) (Program, error) {
	if filepath.Clean(root) == "/" {
		return Program{Path: "/" + path, Env: []string{pathList("PATH", "/", programFolders)}}, nil
	}
	for _, loader := range loaders {
		_, _, err := statIn(root, loader)
		if err == nil {
			return Program{Root: root, Path: "/" + path, Env: []string{pathList("PATH", "/", programFolders)}}, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return Program{}, fmt.Errorf("look for a C library in driver root %q: %w", root, err)
		}
	}
	return Program{
		Path: file,
		Env:  []string{pathList("PATH", root, programFolders), pathList("LD_LIBRARY_PATH", root, libraryFolders)},
	}, nil
}

// pathList is a variable that lists folders of the root.
func pathList(variable, root string, folders []string) string {
	paths := make([]string, len(folders))
	for i, folder := range folders {
		paths[i] = filepath.Join(root, folder)
	}
	return variable + "=" + strings.Join(paths, ":")
}

// Command runs the program, in a process group of its own. When ctx ends, or this
// process does, it is killed; at the end of ctx also what it started.
func (p Program) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.Path, args...)
	cmd.Env = p.Env
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.Root, Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error {
		err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		if errors.Is(err, syscall.ESRCH) {
			return os.ErrProcessDone
		}
		return err
	}
	return cmd
}
