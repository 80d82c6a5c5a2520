// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/host"
)

// Where an interposer library in the style of HAMi-core expects things in the
// container.
const (
	interposerDir   = "/usr/local/vgpu"
	interposerLocks = "/tmp/vgpulock"
	preloadFile     = "/etc/ld.so.preload"
)

// openToAll: the library writes as whatever user the container has. The folders
// are a claim's own and in no other container.
const openToAll = 0o777

// folder holds what the interposer library of a claim's containers keeps. It is
// in no other claim's containers.
func (m *Manager) folder(uid types.UID) string { return filepath.Join(m.limitsDir, string(uid)) }

func (m *Manager) preload() string { return filepath.Join(m.limitsDir, "ld.so.preload") }

func (m *Manager) libraryInContainer() string {
	return filepath.Join(interposerDir, filepath.Base(m.interposer))
}

func (r *Record) limited() bool {
	for i := range r.Devices {
		if r.Devices[i].limited() {
			return true
		}
	}
	return false
}

func (d *DeviceRecord) limited() bool { return d.Sharing != nil && d.Sharing.Limited }

// makeFolders makes what the interposer library needs.
func (m *Manager) makeFolders(r *Record) error {
	if !r.limited() {
		return nil
	}
	if m.interposer == "" {
		return fmt.Errorf("the claim has a share that an interposer library limits, and this node has none any more: set --interposer-library")
	}
	for _, dir := range []string{"cache", "locks"} {
		path := filepath.Join(m.folder(r.Claim.UID), dir)
		if err := os.MkdirAll(path, openToAll); err != nil {
			return fmt.Errorf("folder for software limits: %w", err)
		}
		if err := os.Chmod(path, openToAll); err != nil { // past the umask
			return fmt.Errorf("folder for software limits: %w", err)
		}
	}
	if err := host.ReplaceFile(m.preload(), []byte(m.libraryInContainer()+"\n"), 0o644); err != nil {
		return fmt.Errorf("file that loads the interposer library: %w", err)
	}
	return nil
}

// removeFolders succeeds when there is nothing.
func (m *Manager) removeFolders(uid types.UID) error {
	if err := os.RemoveAll(m.folder(uid)); err != nil {
		return fmt.Errorf("folder for software limits: %w", err)
	}
	return nil
}

// limit adds to a device what holds its containers to the claim's limits. index is
// the device's among all that the claim has of this kind, by PCI address; it is the
// number that the library counts GPUs with.
func (m *Manager) limit(c *cdi.Device, r *Record, d *DeviceRecord, index int) error {
	if m.interposer == "" {
		return errors.New("an interposer library limits it, and this node has none any more")
	}
	cache := filepath.Join(interposerDir, "claims", string(r.Claim.UID))
	n := strconv.Itoa(index)
	c.Env = append(c.Env, "CUDA_DEVICE_MEMORY_SHARED_CACHE="+filepath.Join(cache, "usage.cache"))
	if bytes := d.Sharing.Limits.MemoryBytes; bytes > 0 {
		c.Env = append(c.Env, "CUDA_DEVICE_MEMORY_LIMIT_"+n+"="+strconv.FormatInt(bytes>>20, 10)+"m")
	}
	if percent := d.Sharing.Limits.Percent; percent > 0 {
		c.Env = append(c.Env, "CUDA_DEVICE_SM_LIMIT_"+n+"="+strconv.Itoa(percent))
	}
	folder := m.folder(r.Claim.UID)
	c.Mounts = append(c.Mounts,
		cdi.Mount{HostPath: m.interposer, ContainerPath: m.libraryInContainer(), ReadOnly: true},
		cdi.Mount{HostPath: m.preload(), ContainerPath: preloadFile, ReadOnly: true},
		cdi.Mount{HostPath: filepath.Join(folder, "cache"), ContainerPath: cache},
		cdi.Mount{HostPath: filepath.Join(folder, "locks"), ContainerPath: interposerLocks},
	)
	return nil
}
