// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package host reads the facts about a machine that the kernel and the NVIDIA
// kernel driver publish as files: device nodes, minors, capability files, boot ID.
// It also finds and runs the programs of the driver.
//
// Every path is rooted, so that driver containers, unusual hosts and simulated
// machines are read by the same code. Nothing is cached: majors, minors and
// capability files change with every driver load, and reading them takes
// microseconds.
package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/partage-dev/partage/pkg/gpu/call"
)

// Roots locates the host's file trees for this process, and the driver for the
// container runtime, which runs on the host. The zero value stands for the system
// that this process runs on.
type Roots struct {
	// Driver is the folder that holds usr/lib…, as seen by this process.
	Driver string
	// Dev is the folder that holds dev/nvidia0, as seen by this process, or AutoDev.
	Dev string
	// Proc is the procfs, it holds driver/nvidia and devices. Default "/proc".
	Proc string
	// Sys is the sysfs. Default "/sys".
	Sys string
	// PodLogs is where the kubelet has the logs of the pods of this node. Default "/var/log/pods".
	PodLogs string

	// HostDriver and HostDev are Driver and Dev as the container runtime sees
	// them. CDI specs name these. Default: the same as Driver and Dev. HostDev means
	// nothing with AutoDev.
	HostDriver string
	HostDev    string

	// Calls are the queues in which the driver's files are read, or nil for some of each read's own.
	Calls *call.Queues
	ctx   context.Context // of Within
}

// Complete fills empty fields: "/", "/proc", "/sys", "/var/log/pods", and this process's
// view for that of the host.
func (r Roots) Complete() Roots {
	r.Driver = cmp.Or(r.Driver, "/")
	r.Dev = cmp.Or(r.Dev, "/")
	r.Proc = cmp.Or(r.Proc, "/proc")
	r.Sys = cmp.Or(r.Sys, "/sys")
	r.PodLogs = cmp.Or(r.PodLogs, DefaultPodLogs)
	r.HostDriver = cmp.Or(r.HostDriver, r.Driver)
	if r.Dev != AutoDev {
		r.HostDev = cmp.Or(r.HostDev, r.Dev)
	}
	return r
}

// libraryFolders lists where distributions and driver containers keep the driver's
// libraries, in order of preference.
var libraryFolders = []string{
	"usr/lib64",
	"usr/lib/x86_64-linux-gnu",
	"usr/lib/aarch64-linux-gnu",
	"lib64",
	"lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu",
	"usr/lib",
	"lib",
	folderOfNVIDIA,
}

// folderOfNVIDIA is where containers of Google's Container-Optimized OS have the driver's libraries.
const folderOfNVIDIA = "usr/local/nvidia/lib64"

const (
	nvmlLibrary = "libnvidia-ml.so.1"
	cudaLibrary = "libcuda.so.1"
)

// LibraryPath finds NVML's shared library in the driver root, and resolves links to
// it. The error wraps fs.ErrNotExist when there is none, as before the driver is
// installed.
func (r Roots) LibraryPath() (string, error) {
	_, file, err := r.library(nvmlLibrary)
	return file, err
}

// CUDALibraryPath is LibraryPath for the CUDA driver's library, which there is none of where the driver was
// installed without its compute libraries.
func (r Roots) CUDALibraryPath() (string, error) {
	_, file, err := r.library(cudaLibrary)
	return file, err
}

// UnusualLibraryFolder returns the folder of NVML's library, absolute within the driver
// root, if it is one that dynamic loaders and NVIDIA's toolkit have to be told of,
// otherwise "".
func (r Roots) UnusualLibraryFolder() string {
	if folder, _, err := r.library(nvmlLibrary); err != nil || folder != folderOfNVIDIA {
		return ""
	}
	return "/" + folderOfNVIDIA
}

// library finds a library of the driver in the driver root: its folder within the root,
// and the file that links in it lead to, as this process sees it.
func (r Roots) library(name string) (folder, file string, err error) {
	root := r.Complete().Driver
	for _, folder := range libraryFolders {
		file, info, err := statIn(root, filepath.Join(folder, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", "", fmt.Errorf("find %s in driver root %q: %w", name, root, err)
		}
		if info.Mode().IsRegular() {
			return folder, file, nil
		}
	}
	return "", "", fmt.Errorf("no %s in the library folders of driver root %q: %w", name, root, fs.ErrNotExist)
}
