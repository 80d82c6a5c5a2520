// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/cdi/hook"
)

const (
	// pipeInContainer is where CUDA looks for the daemon by itself, so that a
	// process with an empty environment finds it as well.
	pipeInContainer = "/tmp/nvidia-mps"
	shmInContainer  = "/dev/shm"
)

// connect adds to a device what makes the containers clients of its session.
func (m *Manager) connect(c *cdi.Device, r *Record, d *DeviceRecord) error {
	s := r.session(d.Sharing.Session)
	if s == nil || s.PipeDir == "" || s.ShmDir == "" {
		return fmt.Errorf("MPS session %s does not run", d.Sharing.Session)
	}
	if m.mpsHook == "" {
		return errors.New("there is no hook program that could check its MPS session")
	}
	c.Env = append(c.Env, "CUDA_MPS_PIPE_DIRECTORY="+pipeInContainer, marker(r, s, d)+"="+s.ID)
	if s.Shared {
		// The server's limits are for the largest share. Index 0 is the session's
		// only device; an entry for one that is not visible would void the limits.
		if percent := d.Sharing.Limits.Percent; percent > 0 {
			c.Env = append(c.Env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="+strconv.Itoa(percent))
		}
		if bytes := d.Sharing.Limits.MemoryBytes; bytes > 0 {
			c.Env = append(c.Env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0="+strconv.FormatInt(bytes>>20, 10)+"M")
		}
	}
	c.Mounts = append(c.Mounts,
		cdi.Mount{HostPath: s.PipeDir, ContainerPath: pipeInContainer},
		cdi.Mount{HostPath: s.ShmDir, ContainerPath: shmInContainer})
	c.Hooks = append(c.Hooks, cdi.Hook{Path: m.mpsHook, Args: []string{
		filepath.Base(m.mpsHook), hook.Command, "--control", filepath.Join(s.PipeDir, "control"), "--session", s.ID,
	}})
	return nil
}

// marker is a variable for a claim's own session, or for one share of another. The
// hook refuses a container with two of them, in which one would win silently.
func marker(r *Record, s *SessionRecord, d *DeviceRecord) string {
	what := string(r.Claim.UID) + "/" + s.ID
	if s.Shared {
		what = string(r.Claim.UID) + "/" + d.name()
	}
	return hook.Marker(hook.MPSMarkerPrefix, what)
}
