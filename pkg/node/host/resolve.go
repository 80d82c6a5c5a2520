// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links the kernel follows in one path.
const maxLinks = 40

// statIn finds the file at a path in a root, and its path without symbolic links.
// It follows links like a process with this root: on Debian, usr/bin/nvidia-smi
// leads to /etc/alternatives, which is that of the root, not of this process.
func statIn(root, path string) (string, fs.FileInfo, error) {
	file, err := PathIn(root, path)
	if err != nil {
		return "", nil, err
	}
	info, err := os.Lstat(file)
	return file, info, err
}

// PathIn returns where a path is in a root, without symbolic links, which it follows like
// a process with this root. The file must exist.
func PathIn(root, path string) (string, error) {
	at, rest, links := "/", path, 0
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		next := filepath.Join(at, name)
		target, err := os.Readlink(filepath.Join(root, next))
		if errors.Is(err, unix.EINVAL) { // not a link
			at = next
			continue
		}
		if err != nil {
			return "", err
		}
		if links++; links > maxLinks {
			return "", &fs.PathError{Op: "follow", Path: filepath.Join(root, path), Err: unix.ELOOP}
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = target + "/" + rest
	}
	return filepath.Join(root, at), nil
}
