// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
)

const (
	// controlSocket is the daemon's socket for CUDA programs.
	controlSocket = "control"
	// PrivilegedSocket is the one for commands, to which only root may connect. No
	// container may have it. Older drivers may not have it.
	PrivilegedSocket = "control_privileged"
)

// errSockets: somebody replaced or removed a socket of the daemon. One that is gone is
// fs.ErrNotExist as well; a daemon that quits removes its own.
var errSockets = errors.New("what it says is not believed any more")

// listening returns the sockets that the daemon has made, and the process that listens on them, provided that the keeper has
// started it.
func (d *daemon) listening(ctx context.Context) (daemon process.ID, sockets map[string]process.Socket, err error) {
	sockets = map[string]process.Socket{}
	for _, name := range []string{controlSocket, PrivilegedSocket} {
		path := filepath.Join(daemonFolder, name)
		socket, listener, err := process.Listener(ctx, d.folder.pipe(), path)
		switch {
		case name != controlSocket && errors.Is(err, os.ErrNotExist):
			continue
		case err != nil:
			return daemon, nil, err
		case name == controlSocket && listener.DescendsFrom(d.keeper.ID):
			daemon = listener
		}
		if listener != daemon {
			return daemon, nil, fmt.Errorf("%s listens on %s in the place of the control daemon", listener, filepath.Join(d.folder.pipe(), path))
		}
		sockets[name] = socket
	}
	return daemon, sockets, nil
}

// checkSockets returns an error that wraps errSockets unless all recorded sockets are in their place. A socket has no other
// listener than the process that made it.
func (d *daemon) checkSockets(r *rules.Record) error {
	for name, recorded := range r.Sockets {
		if err := d.checkSocket(d.folder.daemonPipe(), name, recorded); err != nil {
			return fmt.Errorf("the socket of the control daemon (%s): %w", r.Daemon, err)
		}
	}
	if !r.Serving {
		return nil // containers may not have got it yet
	}
	if err := d.checkSocket(d.folder.clientPipe(), controlSocket, r.Sockets[controlSocket]); err != nil {
		return fmt.Errorf("the socket of the control daemon (%s), which containers have: %w", r.Daemon, err)
	}
	return nil
}

func (d *daemon) checkSocket(folder, name string, recorded process.Socket) error {
	now, err := process.IdentifySocket(folder, name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("somebody removed it: %w: %w", err, errSockets)
	case err != nil:
		return fmt.Errorf("somebody replaced it: %w: %w", err, errSockets)
	case now != recorded:
		return fmt.Errorf("somebody replaced it: %s has the inode %d, want %d: %w", filepath.Join(folder, name), now.Inode, recorded.Inode, errSockets)
	}
	return nil
}

// publish links files of the daemon into the folder that containers have. It is the
// same file in both, and the folder stays, so that a running container reaches the
// daemon that comes after this one.
func (f folder) publish(names []string) error {
	for _, name := range names {
		from, to := filepath.Join(f.daemonPipe(), name), filepath.Join(f.clientPipe(), name)
		// Containers do not see this one.
		temporary := filepath.Join(f.pipe(), name+".new")
		_ = os.Remove(temporary) // of a supervisor that was killed
		err := os.Link(from, temporary)
		if name != controlSocket && errors.Is(err, os.ErrNotExist) {
			continue // this driver has no such file
		}
		if err == nil {
			err = os.Rename(temporary, to)
		}
		if err != nil {
			return fmt.Errorf("give containers the daemon's %s: %w", name, err)
		}
	}
	return nil
}
