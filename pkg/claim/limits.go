// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi"
)

// Where an interposer library in the style of HAMi-core expects things in the
// container.
const (
	interposerDir   = "/usr/local/vgpu"
	interposerLocks = "/tmp/vgpulock"
	preloadFile     = "/etc/ld.so.preload"
)

// Names in the folder of a claim.
const (
	// cachesName has a folder for each device, since containers of a claim may have
	// some of them only, which they all number from 0.
	cachesName  = "caches"
	locksName   = "locks"
	preloadName = "ld.so.preload"
)

// limits are what an interposer library needs to hold the containers of claims to
// their limits: a folder for each claim, which is in no other claim's containers.
// Whoever touches that of a claim holds the claim's lock.
type limits struct {
	dir string
	// library is its path on the host, empty where there is none.
	library string
	// mkdir, write and remove are the functions of package os.
	mkdir  func(path string) error
	write  func(path string, data []byte, mode fs.FileMode) error
	remove func(path string) error
}

func newLimits(dir, library string) *limits {
	return &limits{dir: dir, library: library, mkdir: mkdirForAll, write: os.WriteFile, remove: os.RemoveAll}
}

// mkdirForAll: the library writes as whatever user the container has.
func mkdirForAll(path string) error {
	const all = os.ModeSticky | 0o777
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	return os.Chmod(path, all) // past the umask
}

func (d *DeviceRecord) limited() bool { return d.Sharing != nil && d.Sharing.Limited }

func (l *limits) folder(uid types.UID) string { return filepath.Join(l.dir, string(uid)) }

func (l *limits) libraryInContainer() string {
	return filepath.Join(interposerDir, filepath.Base(l.library))
}

var errNoInterposer = errors.New("it is limited by an interposer library, and this node has none any more: set --interposer-library")

// make makes the folder of a claim. What an earlier boot left in it is about processes
// that are gone.
func (l *limits) make(r *Record, fresh bool) error {
	i := slices.IndexFunc(r.Devices, func(d DeviceRecord) bool { return d.limited() })
	if i < 0 {
		return nil
	}
	if l.library == "" {
		return fmt.Errorf("device %s: %w", r.Devices[i].Device, errNoInterposer)
	}
	if fresh {
		if err := l.drop(r.Claim.UID); err != nil {
			return err
		}
	}
	if err := l.fill(l.folder(r.Claim.UID), r); err != nil {
		return fmt.Errorf("device %s: folder for software limits: %w", r.Devices[i].Device, err)
	}
	return nil
}

func (l *limits) fill(folder string, r *Record) error {
	for i := range r.Devices {
		if d := &r.Devices[i]; d.limited() {
			if err := l.mkdir(filepath.Join(folder, cachesName, d.name())); err != nil {
				return err
			}
		}
	}
	if err := l.mkdir(filepath.Join(folder, locksName)); err != nil {
		return err
	}
	return l.preload(filepath.Join(folder, preloadName))
}

// preload writes the file that makes the dynamic loader load the library. Containers
// may be running with the one that is there.
func (l *limits) preload(path string) error {
	want := l.libraryInContainer() + "\n"
	if present, err := os.ReadFile(path); err == nil && string(present) == want {
		return nil
	}
	return l.write(path, []byte(want), 0o644)
}

// drop removes the folder of a claim. None is a success.
func (l *limits) drop(uid types.UID) error {
	folder := l.folder(uid)
	if _, err := os.Lstat(folder); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := l.remove(folder); err != nil {
		return fmt.Errorf("folder for software limits: %w", err)
	}
	return nil
}

// edit adds to a device what holds its containers to the claim's limits.
func (l *limits) edit(c *cdi.Device, r *Record, d *DeviceRecord) error {
	if l.library == "" {
		return errNoInterposer
	}
	// The library numbers what its container has. That is not known here, only
	// what the claim has; where all of it is limited, the names without a number are
	// for a container that has a part of it.
	suffixes := []string{"_" + strconv.Itoa(r.ordinal(d))}
	if !slices.ContainsFunc(r.Devices, func(d DeviceRecord) bool { return !d.limited() }) {
		suffixes = append(suffixes, "")
	}
	for _, suffix := range suffixes {
		if bytes := d.Sharing.Limits.MemoryBytes; bytes > 0 {
			c.Env = append(c.Env, "CUDA_DEVICE_MEMORY_LIMIT"+suffix+"="+strconv.FormatInt(bytes>>20, 10)+"m")
		}
		if percent := d.Sharing.Limits.Percent; percent > 0 {
			c.Env = append(c.Env, "CUDA_DEVICE_SM_LIMIT"+suffix+"="+strconv.Itoa(percent))
		}
	}
	cache := filepath.Join(interposerDir, cachesName, d.name())
	c.Env = append(c.Env, "CUDA_DEVICE_MEMORY_SHARED_CACHE="+filepath.Join(cache, "usage.cache"))
	folder := l.folder(r.Claim.UID)
	c.Mounts = append(c.Mounts,
		cdi.Mount{HostPath: l.library, ContainerPath: l.libraryInContainer(), ReadOnly: true},
		cdi.Mount{HostPath: filepath.Join(folder, preloadName), ContainerPath: preloadFile, ReadOnly: true},
		cdi.Mount{HostPath: filepath.Join(folder, cachesName, d.name()), ContainerPath: cache},
		cdi.Mount{HostPath: filepath.Join(folder, locksName), ContainerPath: interposerLocks},
	)
	return nil
}

// ordinal is the number of a device's GPU or partition among those of the claim, in
// the order of the record, which is that of the PCI addresses.
func (r *Record) ordinal(d *DeviceRecord) int {
	var places []*DeviceRecord
	for i := range r.Devices {
		other := &r.Devices[i]
		at := slices.IndexFunc(places, other.isWith)
		if at < 0 {
			at = len(places)
			places = append(places, other)
		}
		if other == d {
			return at
		}
	}
	return len(places)
}

// isWith tells whether both are the same GPU or partition.
func (d *DeviceRecord) isWith(other *DeviceRecord) bool {
	if d.Partition == nil || other.Partition == nil {
		return d.PCIAddress == other.PCIAddress && d.Partition == nil && other.Partition == nil
	}
	return d.address() == other.address()
}
