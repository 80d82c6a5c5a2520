// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
)

// Paths in the container that a library in the style of HAMi-core expects.
const (
	interposerDir   = "/usr/local/vgpu"
	interposerLocks = "/tmp/vgpulock"
)

// PreloadText is the content of the file at Interposer.PreloadPath, which makes the
// dynamic loader load the library into every program of the container. It does not
// depend on the library's name on the host, which may change while the claim lives.
const PreloadText = hook.InterposerLibrary + "\n"

// Interposer loads a library into the programs of a container that holds them to
// limits. The library numbers the GPUs that it sees from 0, which differs from one
// container of a claim to the next. So the limits here have no number: they are for
// each GPU of the container, and the hook refuses a container that also has
// something else.
type Interposer struct {
	// Library is the library's path on the host.
	Library string
	// Folder is the claim's folder on the host, with what the three methods below
	// name. It must be in the containers of no other claim.
	Folder string
	// Device is the name of the device in the claim.
	Device string
	// Hook is the path on the host of the program that refuses a container in which
	// the limits would be missing, ambiguous, or for other devices too.
	Hook string
	// Owner is what the limits are for, unique on the node. Devices with the same
	// limits that every container has all or none of, as those of one request, may
	// share an owner if they are on different GPUs or partitions. A container cannot
	// have devices of two owners.
	Owner string

	// MemoryBytes and SMPercent limit all programs of the containers together. Zero
	// means no limit.
	MemoryBytes int64
	SMPercent   int
}

// CacheDir is the folder for the library's counters. Any user must be able to write
// to it.
func (i Interposer) CacheDir() string { return filepath.Join(i.Folder, "caches", i.Device) }

// LocksDir is the folder for the library's locks. Any user must be able to write to
// it.
func (i Interposer) LocksDir() string { return filepath.Join(i.Folder, "locks") }

// PreloadPath is the file that says what the dynamic loader loads.
func (i Interposer) PreloadPath() string { return filepath.Join(i.Folder, "ld.so.preload") }

// ErrNoInterposer is returned for a device with limits on a node without a library.
var ErrNoInterposer = errors.New("it is limited by an interposer library, and this node has none any more: set --interposer-library")

// Edits fails if there is no library.
func (i Interposer) Edits() (cdi.Edits, error) {
	if i.Library == "" {
		return cdi.Edits{}, ErrNoInterposer
	}
	cache := filepath.Join(interposerDir, "caches", i.Device)
	// The same owner with other limits is another owner.
	owner := fmt.Sprintf("%s memory=%d sm=%d", i.Owner, i.MemoryBytes, i.SMPercent)
	env := []string{
		"CUDA_DEVICE_MEMORY_SHARED_CACHE=" + filepath.Join(cache, "usage.cache"),
		hook.Marker(hook.LimitsMarkerPrefix, owner) + "=" + i.Device,
	}
	if i.MemoryBytes > 0 {
		env = append(env, "CUDA_DEVICE_MEMORY_LIMIT="+strconv.FormatInt(i.MemoryBytes>>20, 10)+"m")
	}
	if i.SMPercent > 0 {
		env = append(env, "CUDA_DEVICE_SM_LIMIT="+strconv.Itoa(i.SMPercent))
	}
	return cdi.Edits{
		Env: env,
		Mounts: []cdi.Mount{
			{HostPath: i.Library, ContainerPath: hook.InterposerLibrary, ReadOnly: true},
			{HostPath: i.PreloadPath(), ContainerPath: hook.PreloadFile, ReadOnly: true},
			{HostPath: i.CacheDir(), ContainerPath: cache, NoExec: true},
			{HostPath: i.LocksDir(), ContainerPath: interposerLocks, NoExec: true},
		},
		Hooks: []cdi.Hook{{Path: i.Hook, Args: []string{filepath.Base(i.Hook), hook.SoftwareLimitsCommand}}},
	}, nil
}
