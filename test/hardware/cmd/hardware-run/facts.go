// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/hardware/bundle"
)

// smiFacts are what is asked of nvidia-smi, by the file for the answer.
var smiFacts = []struct {
	file string
	args []string
}{
	{"nvidia-smi-q.txt", []string{"-q"}},
	{"nvidia-smi-L.txt", []string{"-L"}},
	{"nvidia-smi-version.txt", []string{"--version"}},
	{"mig-lgip.txt", []string{"mig", "-lgip"}},
	{"mig-lgipp.txt", []string{"mig", "-lgipp"}},
	{"compute-policy-l.txt", []string{"compute-policy", "-l"}},
	{"topo-m.txt", []string{"topo", "-m"}},
}

// facts saves what the node says about itself.
func (p *plan) facts(ctx context.Context) (string, error) {
	var errs []error
	for _, fact := range smiFacts {
		text, err := p.smi.Run(ctx, fact.args...)
		if err != nil {
			text += err.Error() + "\n"
		}
		errs = append(errs, p.write("facts/"+fact.file, text))
	}
	for file, look := range map[string]func(context.Context) string{
		"system.txt": p.system, "proc-driver-nvidia.txt": p.procDriver, "dev.txt": p.devices,
	} {
		text, err := within(ctx, look)
		errs = append(errs, err, p.write("facts/"+file, text))
	}
	if err := errors.Join(errs...); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d files", len(smiFacts)+3), ctx.Err()
}

// readLimit is how long reading the files of the driver may take: one that hangs blocks
// whoever reads them.
const readLimit = 10 * time.Second

// within leaves behind what takes too long to read.
func within(ctx context.Context, read func(context.Context) string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	texts := make(chan string, 1)
	go func() { texts <- read(ctx) }()
	select {
	case text := <-texts:
		return text, nil
	case <-ctx.Done():
		return "", fmt.Errorf("a look into the node's files: %w", ctx.Err())
	}
}

// system describes the node without naming it.
func (p *plan) system(ctx context.Context) string {
	var b strings.Builder
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		fmt.Fprintf(&b, "kernel %s %s %s\n", unix.ByteSliceToString(name.Sysname[:]), unix.ByteSliceToString(name.Release[:]), unix.ByteSliceToString(name.Machine[:]))
	}
	fmt.Fprintf(&b, "glibc %s\nuid %d\n", bundle.Here(ctx), os.Geteuid())
	for _, path := range []string{"/etc/os-release", "/proc/self/limits", "/proc/sys/user/max_user_namespaces", "/proc/sys/fs/nr_open"} {
		fmt.Fprintf(&b, "\n%s:\n%s", path, content(path))
	}
	for line := range strings.Lines(content("/proc/self/status")) {
		if strings.HasPrefix(line, "Cap") || strings.HasPrefix(line, "Seccomp") || strings.HasPrefix(line, "NoNewPrivs") {
			b.WriteString(line)
		}
	}
	for _, path := range []string{"/dev/shm", "/tmp", "/sys/fs/cgroup"} {
		var of unix.Statfs_t
		err := unix.Statfs(path, &of)
		fmt.Fprintf(&b, "file system of %s: type %#x, %d MiB, error %v\n", path, of.Type, int64(of.Blocks)*of.Bsize>>20, err)
	}
	return b.String()
}

// content is that of a file, or why there is none.
func content(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error() + "\n"
	}
	return strings.TrimRight(string(text), "\n") + "\n"
}

// procDriver has all that the kernel driver shows.
func (p *plan) procDriver(ctx context.Context) string {
	var b strings.Builder
	proc := p.options.roots.Proc
	for _, top := range []string{"driver/nvidia", "driver/nvidia-caps"} {
		walk := func(path string, entry fs.DirEntry, err error) error {
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case err != nil:
				fmt.Fprintf(&b, "== %v\n", err)
			case entry.Type().IsRegular():
				relative, _ := filepath.Rel(proc, path)
				fmt.Fprintf(&b, "== /proc/%s\n%s", relative, content(path))
			}
			return nil
		}
		if err := filepath.WalkDir(filepath.Join(proc, top)+"/", walk); err != nil {
			fmt.Fprintf(&b, "== %v\n", err)
		}
	}
	for line := range strings.Lines(content(filepath.Join(proc, "devices"))) {
		if strings.Contains(line, "nvidia") {
			b.WriteString("/proc/devices: " + line)
		}
	}
	return b.String()
}

// devices lists the device nodes, with numbers in place of owners' names.
func (p *plan) devices(context.Context) string {
	var b strings.Builder
	for _, pattern := range []string{"nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "dri/*"} {
		paths, err := filepath.Glob(filepath.Join(p.options.roots.Dev, "dev", pattern))
		if err != nil {
			fmt.Fprintf(&b, "%v\n", err)
		}
		for _, path := range paths {
			relative, _ := filepath.Rel(p.options.roots.Dev, path)
			info, err := os.Lstat(path)
			if err != nil {
				fmt.Fprintf(&b, "%v\n", err)
				continue
			}
			if sys, ok := info.Sys().(*syscall.Stat_t); ok {
				fmt.Fprintf(&b, "%s %d %d %3d:%-3d /%s\n", info.Mode(), sys.Uid, sys.Gid, unix.Major(sys.Rdev), unix.Minor(sys.Rdev), relative)
			}
		}
	}
	return b.String()
}
