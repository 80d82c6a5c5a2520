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

// mount makes the session's shared memory, unless it is there: containers may have
// it already.
func (f folder) mount() error {
	mounted, err := f.mounted()
	if mounted || err != nil {
		return err
	}
	err = unix.Mount("partage-mps-"+f.id(), f.shm(), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=50%")
	if err != nil {
		return fmt.Errorf("mount the shared memory of session %s at %s: %w", f.id(), f.shm(), err)
	}
	return nil
}

// mounted compares devices: a tmpfs always has one of its own, even within another
// tmpfs.
func (f folder) mounted() (bool, error) {
	var inner, outer unix.Stat_t
	err := unix.Lstat(f.shm(), &inner)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err = errors.Join(err, unix.Lstat(string(f), &outer)); err != nil {
		return false, fmt.Errorf("look at %s: %w", f.shm(), err)
	}
	return inner.Dev != outer.Dev, nil
}

// unmount takes away all mounts of the shared memory. Containers that have it keep
// it. Something that looks into the folder from here may hold it for a moment;
// after half of the time it is only detached, and goes when that has ended.
func (f folder) unmount(ctx context.Context, limit time.Duration) error {
	flags := unix.UMOUNT_NOFOLLOW
	patience := time.Now().Add(limit / 2)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("it stays busy"))
	defer cancel()
	var last error
	err := poll(ctx, func() (bool, error) {
		if mounted, err := f.mounted(); !mounted || err != nil {
			return true, err
		}
		last = unix.Unmount(f.shm(), flags)
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
		return fmt.Errorf("unmount %s: %w", f.shm(), errors.Join(err, last))
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
	mounted, err := f.mounted()
	if err != nil {
		return err
	}
	if mounted {
		return fmt.Errorf("delete %s: the shared memory is still mounted", string(f))
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
