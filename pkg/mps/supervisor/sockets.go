// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/partage-dev/partage/pkg/mps/process"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
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

// findSockets finds those that the daemon has made, and the process that listens on them, provided that the keeper has
// started it.
func (d *daemon) findSockets(ctx context.Context) error {
	sockets := map[string]process.Socket{}
	var daemon process.ID
	for _, name := range []string{controlSocket, PrivilegedSocket} {
		socket, listener, err := process.Listener(ctx, d.folder.pipe(), filepath.Join(daemonFolder, name))
		switch {
		case name != controlSocket && errors.Is(err, os.ErrNotExist):
			continue
		case err != nil:
			return err
		case name == controlSocket && listener.DescendsFrom(d.keeper.ID):
			daemon = listener
		}
		if listener != daemon {
			return d.inPlace(listener, filepath.Join(daemonFolder, name))
		}
		sockets[name] = socket
	}
	d.sockets, d.id, d.dialed = sockets, daemon, true
	return nil
}

// identify notes which sockets the daemon has made, and so which process it is.
func (d *daemon) identify(r *rules.Record) {
	id := d.id
	r.Sockets, r.Daemon = d.sockets, &id
}

// checkSockets returns an error that wraps errSockets unless all recorded sockets are
// in their place. A socket has no other listener than the process that made it, so
// who listens is looked up only once in the life of this supervisor: the daemon logs
// every connection.
func (d *daemon) checkSockets(ctx context.Context, r *rules.Record) error {
	if len(r.Sockets) == 0 {
		return nil // it is being started
	}
	for name, recorded := range r.Sockets {
		path := filepath.Join(daemonFolder, name)
		now, err := process.IdentifySocket(d.folder.pipe(), path)
		if err := expect(recorded, now, err); err != nil {
			return fmt.Errorf("%s the socket %s of the control daemon (%s): %w: %w",
				whatHappened(err), filepath.Join(d.folder.pipe(), path), r.Daemon, err, errSockets)
		}
		if d.dialed {
			continue
		}
		_, listener, err := process.Listener(ctx, d.folder.pipe(), path)
		if err == nil && listener != *r.Daemon {
			err = d.inPlace(listener, path)
		}
		if err != nil {
			return err
		}
	}
	d.dialed = true
	if !r.Serving {
		return nil // containers may not have got it yet
	}
	now, err := process.IdentifySocket(d.folder.pipe(), filepath.Join(clientFolder, controlSocket))
	if err := expect(r.Sockets[controlSocket], now, err); err != nil {
		return fmt.Errorf("%s the socket %s of the control daemon (%s), which containers have: %w: %w",
			whatHappened(err), filepath.Join(d.folder.clientPipe(), controlSocket), r.Daemon, err, errSockets)
	}
	return nil
}

func (d *daemon) inPlace(listener process.ID, name string) error {
	return fmt.Errorf("%s listens on %s in the place of the control daemon", listener, filepath.Join(d.folder.pipe(), name))
}

// whatHappened begins the error about a socket that is not the recorded one.
func whatHappened(err error) string {
	if errors.Is(err, os.ErrNotExist) {
		return "somebody removed"
	}
	return "somebody replaced"
}

// expect returns an error unless a socket could be looked at and is the recorded one.
func expect(recorded, now process.Socket, err error) error {
	if err == nil && now != recorded {
		return fmt.Errorf("it has the inode %d, want %d", now.Inode, recorded.Inode)
	}
	return err
}

// publish links files of the daemon into the folder that containers have. It is the
// same file in both, and the folder stays, so that a running container reaches the
// daemon that comes after this one.
func (f folder) publish(names []string) error {
	for _, name := range names {
		from, to := filepath.Join(f.daemonPipe(), name), filepath.Join(f.clientPipe(), name)
		if same(from, to) {
			continue
		}
		// Containers do not see this one.
		temporary := filepath.Join(f.pipe(), name+".new")
		if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("give containers the daemon's %s: %w", name, err)
		}
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

// same reports whether both paths are links of one file, which renaming would leave
// alone.
func same(a, b string) bool {
	infoA, errA := os.Lstat(a)
	infoB, errB := os.Lstat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}
