// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
)

const shmInContainer = "/dev/shm"

// MPSClient makes the programs of a container clients of an MPS session.
type MPSClient struct {
	// Session is the session's name.
	Session string
	// PipeDir and ShmDir are the session's folders on the host; ShmDir is empty where clients need none.
	PipeDir, ShmDir string
	// Hook is the path on the host of the program that refuses a container which
	// cannot reach the daemon, or is not a client of this session alone.
	Hook string
	// Owner is what the container is a client for, unique on the node: a claim and
	// its session, or a claim and its share of the session's device. A container may
	// have several devices of one owner, and none of another.
	Owner string

	// ActiveThreadPercentage and PinnedMemoryBytes limit each client. Zero means
	// the server's limit. They are for sessions with one device.
	ActiveThreadPercentage int
	PinnedMemoryBytes      int64
	// BelowNormal gives the clients the lower priority, whatever the server's is. It is
	// advice: a program sets its own environment.
	BelowNormal bool
}

// Edits fails if the session does not run.
func (c MPSClient) Edits() (cdi.Edits, error) {
	if c.PipeDir == "" {
		return cdi.Edits{}, fmt.Errorf("MPS session %s does not run", c.Session)
	}
	env := []string{
		"CUDA_MPS_PIPE_DIRECTORY=" + hook.MPSFolder,
		hook.Marker(hook.MPSMarkerPrefix, c.Owner) + "=" + c.Session,
	}
	if c.ActiveThreadPercentage > 0 {
		env = append(env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="+strconv.Itoa(c.ActiveThreadPercentage))
	}
	if c.PinnedMemoryBytes > 0 {
		// Index 0 is the session's only device. An entry for a device that is not
		// visible would void all limits.
		env = append(env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0="+strconv.FormatInt(c.PinnedMemoryBytes>>20, 10)+"M")
	}
	if c.BelowNormal {
		env = append(env, "CUDA_MPS_CLIENT_PRIORITY=1")
	}
	// A program connects to a socket that it cannot write, replace or remove.
	mounts := []cdi.Mount{{HostPath: c.PipeDir, ContainerPath: hook.MPSFolder, ReadOnly: true, NoExec: true}}
	if c.ShmDir != "" {
		mounts = append(mounts, cdi.Mount{HostPath: c.ShmDir, ContainerPath: shmInContainer, NoExec: true, NoFollow: true})
	}
	return cdi.Edits{
		Env: env, Mounts: mounts,
		// The server is of the driver: a newer library may not understand it (805 or 806, not tried).
		NodesLibrary: true,
		Hooks: []cdi.Hook{{Path: c.Hook, Args: []string{
			filepath.Base(c.Hook), hook.MPSClientCommand, "--" + hook.ControlFlag, filepath.Join(c.PipeDir, "control"), "--" + hook.SessionFlag, c.Session,
		}}},
	}, nil
}
