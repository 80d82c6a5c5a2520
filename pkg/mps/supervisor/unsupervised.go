// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/keeper"
	"github.com/partage-dev/partage/pkg/mps/process"
)

// Unsupervised runs MPS as a Supervisor does, outside of any session: for the
// conformance kit, which wants to see what NVIDIA's programs do by themselves. A
// program that uses it must have LaunchCommand.
type Unsupervised struct{ program controlProgram }

// NewUnsupervised finds NVIDIA's programs and makes the folders of a session in dir,
// which must not be in a Supervisor's. The shared memory is no file system of its own.
func NewUnsupervised(roots host.Roots, dir string) (Unsupervised, error) {
	f := folder(dir)
	program, err := newControlProgram(roots, f)
	if err != nil {
		return Unsupervised{}, err
	}
	const everybody = 0o777 | os.ModeSticky
	for path, mode := range map[string]os.FileMode{
		f.daemonPipe(): folderMode, f.clientPipe(): folderMode, string(f.logs()): folderMode, f.shm(): everybody,
	} {
		if err := os.MkdirAll(path, folderMode); err != nil {
			return Unsupervised{}, fmt.Errorf("make a folder for MPS: %w", err)
		}
		if err := os.Chmod(path, mode); err != nil { // whatever the umask is
			return Unsupervised{}, fmt.Errorf("make a folder for MPS: %w", err)
		}
	}
	if err := f.makeKeeper(); err != nil {
		return Unsupervised{}, err
	}
	return Unsupervised{program: program}, nil
}

// DaemonPipe is the pipe folder of the daemon, ClientPipe an empty one beside it, in the
// same file system, and SharedMemory the daemon's /dev/shm.
func (u Unsupervised) DaemonPipe() string { return u.program.folder.daemonPipe() }

// ClientPipe is described at DaemonPipe.
func (u Unsupervised) ClientPipe() string { return u.program.folder.clientPipe() }

// SharedMemory is described at DaemonPipe.
func (u Unsupervised) SharedMemory() string { return u.program.folder.shm() }

// Daemon returns the command that runs the keeper of a control daemon for the devices of the spec. It ends with all that the
// daemon has started when it gets SIGTERM.
func (u Unsupervised) Daemon(spec mps.Spec) *exec.Cmd { return u.program.daemon(spec) }

// Client returns the command that reads commands for the daemon from its standard input.
func (u Unsupervised) Client(ctx context.Context) (*exec.Cmd, error) {
	kept, found, err := keeper.Of(u.program.folder.keeper())
	if err == nil && !found {
		err = errors.New("there is no control daemon")
	}
	if err != nil {
		return nil, err
	}
	daemon, err := startedBy(kept)
	if err != nil {
		return nil, err
	}
	root, err := rootOf(daemon)
	if err != nil {
		return nil, err
	}
	cmd := u.program.client(ctx, root)
	cmd.ExtraFiles = append(cmd.ExtraFiles, root) // open until it is started
	return cmd, nil
}

// Owns reports whether a process is the daemon's, or a server of it.
func (u Unsupervised) Owns(id process.ID) bool {
	kept, found, err := keeper.Of(u.program.folder.keeper())
	return found && err == nil && id.DescendsFrom(kept)
}

// EndUnsupervised ends all that a daemon in a folder has started, also of an earlier Unsupervised, and waits for the end.
func EndUnsupervised(ctx context.Context, dir string) error {
	return keeper.End(ctx, folder(dir).keeper())
}
