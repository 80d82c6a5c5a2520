// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
)

// Unsupervised runs MPS as a Supervisor does, outside of any session: for the
// conformance program, which wants to see what NVIDIA's programs do by themselves. A
// program that uses it must have LaunchCommand.
type Unsupervised struct {
	// DaemonPipe is the pipe folder of the daemon, ClientPipe an empty one beside it, in the
	// same file system, and SharedMemory the daemon's /dev/shm.
	DaemonPipe, ClientPipe, SharedMemory string

	program controlProgram
}

// NewUnsupervised finds NVIDIA's programs and makes the folders of a session in dir,
// which must not be in a Supervisor's. The shared memory is no file system of its own.
func NewUnsupervised(roots host.Roots, dir string) (Unsupervised, error) {
	f := folder(dir)
	program, err := newControlProgram(roots, f)
	if err != nil {
		return Unsupervised{}, err
	}
	_ = allowOpenFiles() // a check of the conformance program says what came of it
	const everybody = 0o777 | os.ModeSticky
	for path, mode := range map[string]os.FileMode{
		f.daemonPipe(): folderMode, f.clientPipe(): folderMode, string(f.logs()): folderMode, f.memory().shm(): everybody,
	} {
		err = errors.Join(err, makeFolder(path, mode))
	}
	if err = errors.Join(err, makeKeeper(f.keeper())); err != nil {
		return Unsupervised{}, fmt.Errorf("make a folder for MPS: %w", err)
	}
	return Unsupervised{DaemonPipe: f.daemonPipe(), ClientPipe: f.clientPipe(), SharedMemory: f.memory().shm(), program: program}, nil
}

// Daemon returns the command that runs the keeper of a control daemon for the devices of the spec. It ends with all that the
// daemon has started when it gets SIGTERM.
func (u Unsupervised) Daemon(spec mps.Spec) *exec.Cmd { return u.program.daemon(spec) }

// Client returns the command that reads commands for a daemon from its standard input.
func (u Unsupervised) Client(ctx context.Context, daemon process.ID) (*exec.Cmd, error) {
	root, err := rootOf(daemon)
	if err != nil {
		return nil, err
	}
	cmd := u.program.client(ctx, root)
	cmd.ExtraFiles = append(cmd.ExtraFiles, root) // open until it is started
	return cmd, nil
}

// EndUnsupervised ends all that a daemon in a folder has started, also of an earlier Unsupervised, and waits for the end.
func EndUnsupervised(ctx context.Context, dir string) error {
	return keeper.End(ctx, folder(dir).keeper())
}
