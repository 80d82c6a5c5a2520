// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/host"
)

// daemonLog has what launcher and daemon print; the other logs are the daemon's.
const daemonLog = "daemon.log"

var logNames = []string{daemonLog, "control.log", "server.log"}

const (
	// maxLog bounds each log: the folder is usually in memory, and a daemon writes
	// a line for every command it gets.
	maxLog = 4 << 20
	// tailLines of each log are part of an error.
	tailLines = 8
)

// folderMode lets servers through that run as the user of their clients.
const folderMode = 0o755

// make reports whether there was nothing before.
func (f folder) make() (fresh bool, err error) {
	if err := os.Mkdir(string(f), folderMode); err == nil {
		fresh = true
	}
	for _, path := range []string{string(f), f.pipe(), f.log(), f.shm()} {
		if err := os.MkdirAll(path, folderMode); err != nil {
			return false, fmt.Errorf("make the folders of session %s: %w", f.id(), err)
		}
		if path == f.shm() {
			continue // it may be mounted
		}
		// The umask does not decide who comes through.
		if err := os.Chmod(path, folderMode); err != nil {
			return false, fmt.Errorf("make the folders of session %s: %w", f.id(), err)
		}
	}
	return fresh, nil
}

// mountpoint is a file system of the session's own. Its clients can write to it, and
// must not be able to fill the host's.
type mountpoint struct{ path, options string }

func (f folder) mountpoints() []mountpoint {
	return []mountpoint{
		// MPS makes a handful of sockets and files.
		{f.pipe(), "mode=755,size=1m,nr_inodes=1k"},
		{f.shm(), "mode=1777,size=50%"},
	}
}

// mounted compares devices: a tmpfs always has one of its own, even within another
// tmpfs.
func (m mountpoint) mounted() (bool, error) {
	var inner, outer unix.Stat_t
	err := unix.Lstat(m.path, &inner)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err = errors.Join(err, unix.Lstat(filepath.Dir(m.path), &outer)); err != nil {
		return false, fmt.Errorf("look at %s: %w", m.path, err)
	}
	return inner.Dev != outer.Dev, nil
}

// mount makes the session's file systems, unless they are there: containers may have
// them already.
func (f folder) mount() error {
	for _, m := range f.mountpoints() {
		mounted, err := m.mounted()
		if err == nil && !mounted {
			err = unix.Mount("partage-mps-"+f.id(), m.path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, m.options)
		}
		if err != nil {
			return fmt.Errorf("mount a tmpfs of session %s at %s: %w", f.id(), m.path, err)
		}
	}
	return nil
}

// unmounted names what is not mounted.
func (f folder) unmounted() (paths []string, err error) {
	for _, m := range f.mountpoints() {
		mounted, err := m.mounted()
		if err != nil {
			return nil, err
		}
		if !mounted {
			paths = append(paths, m.path)
		}
	}
	return paths, nil
}

// unmount takes away all mounts of the session. Containers that have them keep them.
// Something that looks into the folder from here may hold one for a moment; after
// half of the time it is only detached, and goes when that has ended.
func (f folder) unmount(ctx context.Context, limit time.Duration) error {
	patience := time.Now().Add(limit / 2)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("it stays busy"))
	defer cancel()
	var errs []error
	for _, m := range f.mountpoints() {
		errs = append(errs, m.unmount(ctx, patience))
	}
	return errors.Join(errs...)
}

func (m mountpoint) unmount(ctx context.Context, patience time.Time) error {
	flags := unix.UMOUNT_NOFOLLOW
	var last error
	err := poll(ctx, func() (bool, error) {
		if mounted, err := m.mounted(); !mounted || err != nil {
			return true, err
		}
		last = unix.Unmount(m.path, flags)
		switch {
		case last == nil:
			return false, nil // mounts may be stacked
		case !errors.Is(last, unix.EBUSY):
			return true, last
		case time.Now().After(patience):
			flags |= unix.MNT_DETACH
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("unmount %s: %w", m.path, errors.Join(err, last))
	}
	return nil
}

// clearPipe removes what an earlier daemon left, whose sockets would look like
// ones that somebody listens on. The folder itself stays: containers have it.
func (f folder) clearPipe() error {
	entries, err := os.ReadDir(f.pipe())
	if err != nil {
		return fmt.Errorf("clear the pipe folder: %w", err)
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(f.pipe(), entry.Name())); err != nil {
			return fmt.Errorf("clear the pipe folder: %w", err)
		}
	}
	return nil
}

// foreign finds something that shows that the folder is not a session's. What the
// supervisor was told to work in may be the wrong folder, and it deletes.
func (f folder) foreign() (string, error) {
	if _, err := os.Lstat(f.record()); err == nil {
		return "", nil
	}
	entries, err := os.ReadDir(string(f))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("look at %s: %w", string(f), err)
	}
	ours := []string{f.pipe(), f.log(), f.shm(), host.TemporaryName(f.record())}
	for _, entry := range entries {
		if path := filepath.Join(string(f), entry.Name()); !slices.Contains(ours, path) {
			return path, nil
		}
	}
	return "", nil
}

// delete takes the folder away. The caller has unmounted.
func (f folder) delete() error {
	unmounted, err := f.unmounted()
	if err != nil {
		return err
	}
	if len(unmounted) < len(f.mountpoints()) {
		return fmt.Errorf("delete %s: it still has mounts", string(f))
	}
	if err := os.RemoveAll(string(f)); err != nil {
		return fmt.Errorf("remove the folder of session %s: %w", f.id(), err)
	}
	return nil
}

// tail is the end of all logs, for errors.
func (f folder) tail() string {
	var parts []string
	for _, name := range logNames {
		data, err := readEnd(filepath.Join(f.log(), name), 4096)
		if err != nil {
			continue // it has not come to writing one
		}
		lines := strings.Split(strings.TrimSpace(string(data)), "\n")
		lines = lines[max(0, len(lines)-tailLines):]
		if text := strings.Join(lines, " | "); text != "" {
			parts = append(parts, name+": "+text)
		}
	}
	if len(parts) == 0 {
		return "the daemon has logged nothing"
	}
	return strings.Join(parts, "; ")
}

func readEnd(path string, most int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	return readFrom(path, max(0, info.Size()-most))
}

func readFrom(path string, offset int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return io.ReadAll(io.NewSectionReader(file, offset, maxLog))
}

// boundLogs puts aside what a log has when it has grown too large. The daemon has it
// open, so it is emptied and not replaced.
func (f folder) boundLogs() error {
	for _, name := range logNames {
		path := filepath.Join(f.log(), name)
		info, err := os.Stat(path)
		if err != nil || info.Size() <= maxLog {
			continue
		}
		data, err := readEnd(path, maxLog/16)
		if err == nil {
			err = os.WriteFile(path+".old", data, 0o600)
		}
		if err = errors.Join(err, os.Truncate(path, 0)); err != nil {
			return fmt.Errorf("bound the logs of session %s: %w", f.id(), err)
		}
	}
	return nil
}

// user returns whom a server serves: what the daemon said when it started the
// server, or as whom the process runs. It is empty if neither is known.
func (f folder) user(server int) string {
	for _, name := range serverLogs {
		data, err := readEnd(filepath.Join(f.log(), name), maxLog/16)
		if err != nil {
			continue
		}
		_, after, found := cutLast(string(data), fmt.Sprintf("Starting new server %d for user ", server))
		if user, _, _ := strings.Cut(after, "\n"); found && user != "" {
			return strings.TrimSpace(user)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(procRoot, strconv.Itoa(server)), &st); err != nil {
		return ""
	}
	return strconv.FormatUint(uint64(st.Uid), 10)
}

// endedInOrder tells whether a server ended as it should, which includes that nobody
// says otherwise.
func (f folder) endedInOrder(server int) bool {
	inOrder := true
	for _, name := range serverLogs {
		data, err := readEnd(filepath.Join(f.log(), name), maxLog/16)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			_, how, _ := strings.Cut(line, fmt.Sprintf("Server %d ", server))
			if strings.HasPrefix(how, "exited") || strings.HasPrefix(how, "ended") {
				inOrder = strings.HasPrefix(how, "exited with status 0")
			}
		}
	}
	return inOrder
}

// position is how long the logs were that tell of servers.
type position map[string]int64

// serverLogs may both have what the daemon says in the foreground.
var serverLogs = []string{daemonLog, "control.log"}

func (f folder) position() position {
	p := position{}
	for _, name := range serverLogs {
		if info, err := os.Stat(filepath.Join(f.log(), name)); err == nil {
			p[name] = info.Size()
		}
	}
	return p
}

// serverFailed finds a line since then in which the daemon says that a server ended
// in failure. It only makes a failure known sooner.
func (f folder) serverFailed(since position) string {
	for _, name := range serverLogs {
		data, err := readFrom(filepath.Join(f.log(), name), since[name])
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			if strings.Contains(line, "exited with status ") && !strings.Contains(line, "exited with status 0") {
				return strings.TrimSpace(line)
			}
		}
	}
	return ""
}
