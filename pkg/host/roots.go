// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package host reads the facts about a machine that the NVIDIA kernel driver
// and the kernel publish as files: device nodes, capability files, boot id.
//
// Every path is rooted, so that driver containers, unusual hosts and simulated
// machines are read by the same code. Nothing is cached: majors, minors and
// capability files change with every driver load, and reading them takes
// microseconds.
package host

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
)

// Roots say where this process finds the host's trees, and where the container
// runtime, which lives on the host, finds the driver. The zero value reads the
// running system.
type Roots struct {
	// Driver is the folder that holds usr/lib…, as seen by this process.
	Driver string
	// Dev is the folder that holds dev/nvidia0, as seen by this process.
	Dev string
	// Proc is the procfs, it holds driver/nvidia and devices. Default "/proc".
	Proc string
	// Sys is the sysfs. Default "/sys".
	Sys string

	// HostDriver and HostDev are Driver and Dev as the container runtime sees
	// them. CDI specs name these. Default: the same as Driver and Dev.
	HostDriver string
	HostDev    string
}

// Complete fills what is empty: "/", "/proc", "/sys", and this process's own
// view for the host's.
func (r Roots) Complete() Roots {
	set := func(field *string, value string) {
		if *field == "" {
			*field = value
		}
	}
	set(&r.Driver, "/")
	set(&r.Dev, "/")
	set(&r.Proc, "/proc")
	set(&r.Sys, "/sys")
	set(&r.HostDriver, r.Driver)
	set(&r.HostDev, r.Dev)
	return r
}

// libraryFolders are where distributions and driver containers keep the
// driver's libraries, in order of preference.
var libraryFolders = []string{
	"usr/lib64",
	"usr/lib/x86_64-linux-gnu",
	"usr/lib/aarch64-linux-gnu",
	"lib64",
	"lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu",
	"usr/lib",
	"lib",
}

const nvmlLibrary = "libnvidia-ml.so.1"

// LibraryPath finds NVML's shared library under the driver root, as the file
// itself and not a link to it. The error wraps fs.ErrNotExist when there is none,
// which is how a driver that is not installed yet looks.
func (r Roots) LibraryPath() (string, error) {
	root := r.Complete().Driver
	for _, folder := range libraryFolders {
		file, info, err := statIn(root, filepath.Join(folder, nvmlLibrary))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("look for the NVML library in driver root %q: %w", root, err)
		}
		if info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("no %s in the library folders of driver root %q: %w", nvmlLibrary, root, fs.ErrNotExist)
}
