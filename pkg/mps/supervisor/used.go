// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// used are the files of one device that processes have.
//
// No file that a process has is looked at itself: it may be on a server that does not
// answer, and that a tenant has chosen, so that the look never ends. What procfs says of
// it comes from the kernel's memory.
type used struct {
	device uint64
	// mounts are the IDs of the device's mounts, in all namespaces.
	mounts map[string]bool
	// files are those that are open or mapped, by inode.
	files map[uint64]bool
	// folders are the names of those that processes work in, wherever they are.
	folders map[string]bool
}

// hasFile and hasFolder report whether somebody has it. Without a look, nobody does.
func (u *used) hasFile(ino uint64) bool    { return u != nil && u.files[ino] }
func (u *used) hasFolder(name string) bool { return u != nil && u.folders[name] }

// used returns the files of a device that processes have open or mapped, or work in.
func (l *leftover) used(ctx context.Context, device uint64) (*used, error) {
	processes, err := l.processes()
	if err != nil {
		return nil, err
	}
	var all []string
	for _, process := range processes {
		all = append(all, threads(process)...)
	}
	u := &used{device: device, mounts: map[string]bool{}, files: map[uint64]bool{}, folders: map[string]bool{}}
	if err := u.addMounts(all); err != nil {
		return nil, err
	}
	for _, process := range all {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := errors.Join(u.addOpen(process), u.addMapped(process)); err != nil {
			return nil, err
		}
		if folder, err := os.Readlink(filepath.Join(process, "cwd")); err == nil {
			u.folders[filepath.Base(folder)] = true
		}
	}
	return u, nil
}

// threads returns the folder of a process or, if its first thread has ended and shows
// nothing any more, those of all threads.
func threads(process string) []string {
	if _, err := os.Readlink(namespace(process)); err == nil {
		return []string{process}
	}
	all, _ := filepath.Glob(filepath.Join(process, "task", "*"))
	return all
}

// namespace is the link that names a process's mount namespace.
func namespace(process string) string { return filepath.Join(process, "ns", "mnt") }

// addMounts adds the mounts of all mount namespaces that processes are in.
func (u *used) addMounts(processes []string) error {
	seen := map[string]bool{}
	for _, process := range processes {
		name, err := os.Readlink(namespace(process))
		if err != nil || seen[name] {
			continue
		}
		complete := false
		err = eachLine(filepath.Join(process, "mountinfo"), func(line []byte) error {
			complete = true
			// id parent device …
			if fields := bytes.Fields(line); len(fields) > 2 && string(fields[2]) == u.number("%d:%d") {
				u.mounts[string(fields[0])] = true
			}
			return nil
		})
		if err != nil {
			return err
		}
		seen[name] = complete
	}
	return nil
}

// number formats the number of the device.
func (u *used) number(format string) string {
	return fmt.Sprintf(format, unix.Major(u.device), unix.Minor(u.device))
}

// addOpen adds the files that a process has open.
func (u *used) addOpen(process string) error {
	files, _ := filepath.Glob(filepath.Join(process, "fdinfo", "*"))
	for _, path := range files {
		var mount, ino string
		err := eachLine(path, func(line []byte) error {
			name, value, _ := strings.Cut(string(line), ":")
			switch name {
			case "mnt_id":
				mount = strings.TrimSpace(value)
			case "ino":
				ino = strings.TrimSpace(value)
				return fs.SkipAll // what follows may be long
			}
			return nil
		})
		if err != nil {
			return err
		}
		if !u.mounts[mount] {
			continue
		}
		if err := u.add(path, ino); err != nil {
			return err
		}
	}
	return nil
}

// addMapped adds the files that a process has mapped.
func (u *used) addMapped(process string) error {
	path, device := filepath.Join(process, "maps"), u.number("%02x:%02x")
	return eachLine(path, func(line []byte) error {
		// addresses permissions offset device inode path
		fields := bytes.Fields(line)
		if len(fields) < 5 || string(fields[3]) != device {
			return nil
		}
		return u.add(path, string(fields[4]))
	})
}

func (u *used) add(path, number string) error {
	ino, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return fmt.Errorf("read %s: which file it is: %w", path, err)
	}
	u.files[ino] = true
	return nil
}

// eachLine calls a function with each line of a file of procfs, until it returns an error,
// which may be fs.SkipAll. What cannot be opened belongs to a process that has ended.
func eachLine(path string, do func(line []byte) error) error {
	file, err := os.Open(path)
	if err != nil {
		return nil // as said
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		switch err := do(lines.Bytes()); {
		case errors.Is(err, fs.SkipAll):
			return nil
		case err != nil:
			return err
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
