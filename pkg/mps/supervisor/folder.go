// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
)

// folder is the folder of a session.
type folder string

func (f folder) id() string     { return filepath.Base(string(f)) }
func (f folder) pipe() string   { return filepath.Join(string(f), "pipe") }
func (f folder) memory() memory { return memory(filepath.Join(string(f), "memory")) }
func (f folder) logs() logs     { return logs(filepath.Join(string(f), "log")) }
func (f folder) record() string { return filepath.Join(string(f), "session.json") }

// keeper is the file that the keeper of the daemon has locked.
func (f folder) keeper() string { return filepath.Join(string(f), "keeper.lock") }

// The folders in pipe. Both are in one mount, so that a file can be linked from one
// to the other.
const (
	daemonFolder = "daemon"
	clientFolder = "client"
)

// daemonPipe is the folder in which the daemon makes its sockets. No container has it.
func (f folder) daemonPipe() string { return filepath.Join(f.pipe(), daemonFolder) }

// clientPipe is the folder that containers have, which they cannot write.
func (f folder) clientPipe() string { return filepath.Join(f.pipe(), clientFolder) }

const (
	// folderMode lets servers in that run as the user of their clients.
	folderMode = 0o755
	// longID is more than the IDs of sessions have, which are names of devices.
	longID = 51
)

// MaxDir returns how many bytes the path of a folder may have in which sessions are.
func MaxDir() int {
	return host.MaxSocketPath - len(filepath.Join(folder("/"+strings.Repeat("x", longID)).daemonPipe(), PrivilegedSocket))
}

// check refuses a folder in which MPS could not make its sockets, and one that is
// not a session's.
func (f folder) check() error {
	// The longer of the two sockets that a daemon makes.
	path := filepath.Join(f.daemonPipe(), PrivilegedSocket)
	if len(path) > host.MaxSocketPath {
		return fmt.Errorf("%w: session %s: the socket %s has %d bytes, a socket's path has at most %d: use a shorter folder or id",
			mps.ErrInvalid, f.id(), path, len(path), host.MaxSocketPath)
	}
	switch foreign, err := f.foreign(); {
	case err != nil:
		return err
	case foreign != "":
		return fmt.Errorf("%w: session %s: %s is not the folder of a session, it contains %s", mps.ErrInvalid, f.id(), string(f), foreign)
	}
	return nil
}

// foreign returns something that shows that the folder is not a session's. The
// supervisor may have been told to use the wrong folder, and it deletes.
func (f folder) foreign() (string, error) {
	if _, err := os.Lstat(f.record()); err == nil {
		return "", nil
	}
	entries, err := os.ReadDir(string(f))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read %s: %w", string(f), err)
	}
	ours := []string{f.record(), f.pipe(), string(f.logs()), string(f.memory()), f.keeper(), host.TemporaryName(f.record())}
	for _, entry := range entries {
		if path := filepath.Join(string(f), entry.Name()); !slices.Contains(ours, path) && !host.IsAside(entry.Name()) {
			return path, nil
		}
	}
	return "", nil
}

// make makes the folder.
func (f folder) make() error {
	if err := errors.Join(makeFolder(string(f), folderMode), makeKeeper(f.keeper())); err != nil {
		return fmt.Errorf("make the folder of session %s: %w", f.id(), err)
	}
	return nil
}

// makeFolder makes a folder with this mode, whatever the umask is.
func makeFolder(path string, mode os.FileMode) error {
	if err := os.MkdirAll(path, folderMode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// makeKeeper makes the file without which there can be no keeper.
func makeKeeper(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return file.Close()
}

// clearPipe makes the folders of sockets, or removes what an earlier daemon left in
// them: its sockets would look like ones that are in use. The folders themselves stay:
// containers have one mounted.
func (f folder) clearPipe(ctx context.Context) error {
	for _, path := range []string{f.daemonPipe(), f.clientPipe()} {
		if err := makeFolder(path, folderMode); err != nil {
			return fmt.Errorf("make a folder of sockets: %w", err)
		}
		if err := host.ClearFolder(ctx, path); err != nil {
			return fmt.Errorf("remove what an earlier daemon left: %w", err)
		}
	}
	return nil
}

// remove removes the folder of a session that has ended. What somebody keeps of its memory has limit to go.
func (f folder) remove(ctx context.Context, limit time.Duration) error {
	kept, err := f.memory().empty(ctx, limit)
	if err == nil {
		err = f.unmount(kept)
	}
	if err != nil {
		return err
	}
	// A keeper that an earlier supervisor started may not have come to lock its file.
	lock, err := keeper.Lock(f.keeper())
	if err == nil && kept {
		err = os.Remove(f.record())
	} else if err == nil {
		err = host.RemoveTree(ctx, string(f))
	}
	if lock != nil {
		err = errors.Join(err, lock.Close())
	}
	if err != nil {
		return fmt.Errorf("remove the folder of session %s: %w", f.id(), err)
	}
	return nil
}
