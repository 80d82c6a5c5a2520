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

// programFolders lists where distributions and driver containers keep the driver's
// programs, in order of preference.
var programFolders = []string{"usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "usr/local/nvidia/bin", "opt/bin"}

// loaders are the dynamic loaders of a complete system.
var loaders = []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"}

// Program is an executable of the NVIDIA driver.
type Program struct {
	// Root is the folder to which it changes its root. It is empty where the driver
	// root has no C library, so that the program uses that of this process.
	Root string
	// Path is absolute, within Root.
	Path string
	// Env is its environment.
	Env []string
}

// Program finds an executable of the driver, for example "nvidia-smi". In a driver
// root that is a complete system it runs with that as its root, because it needs
// the C library there. The error wraps fs.ErrNotExist when there is no such program.
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
			return Program{}, fmt.Errorf("find %s in driver root %q: %w", name, root, err)
		}
		if info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return r.program(root, path, file)
		}
		unusable += fmt.Sprintf(", and %s cannot be executed", file)
	}
	return Program{}, fmt.Errorf("no %s in the program folders of driver root %q%s: %w", name, root, unusable, fs.ErrNotExist)
}

// program describes the executable at a path in the root. The file is what the path
// resolves to, as seen by this process.
func (r Roots) program(root, path, file string) (Program, error) {
	env := []string{pathList("PATH", "/", programFolders)}
	if folder := r.UnusualLibraryFolder(); folder != "" {
		env = append(env, "LD_LIBRARY_PATH="+folder)
	}
	if filepath.Clean(root) == "/" {
		return Program{Path: "/" + path, Env: env}, nil
	}
	for _, loader := range loaders {
		_, _, err := statIn(root, loader)
		if err == nil {
			return Program{Root: root, Path: "/" + path, Env: env}, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return Program{}, fmt.Errorf("find a C library in driver root %q: %w", root, err)
		}
	}
	return Program{
		Path: file,
		Env:  []string{pathList("PATH", root, programFolders), pathList("LD_LIBRARY_PATH", root, libraryFolders)},
	}, nil
}

// pathList makes a variable that lists folders of the root.
func pathList(variable, root string, folders []string) string {
	paths := make([]string, len(folders))
	for i, folder := range folders {
		paths[i] = filepath.Join(root, folder)
	}
	return variable + "=" + strings.Join(paths, ":")
}

// Command prepares to run the program in a process group of its own. The program is
// killed when this process ends or ctx does, and with ctx also what it has started.
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
