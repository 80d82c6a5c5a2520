// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// logs is the folder of a session's logs.
type logs string

// daemonLog is what launcher and daemon print; the daemon writes the other logs.
const daemonLog = "daemon.log"

var (
	logNames = []string{daemonLog, "control.log", "server.log"}
	// serverLogs are the logs in which a daemon reports on its servers. In the
	// foreground it may print the same.
	serverLogs = []string{daemonLog, "control.log"}
)

const (
	// maxLog bounds each log: the folder is usually in memory, and a daemon writes
	// a line for every command that it gets.
	maxLog = 4 << 20
	// tailLines is how many lines of each log become part of an error.
	tailLines = 8
)

func (l logs) path(name string) string { return filepath.Join(string(l), name) }

// open opens a new daemonLog. The logs of the last daemon are kept with the
// extension .old.
func (l logs) open() (*os.File, error) {
	for _, name := range logNames {
		path := l.path(name)
		if err := os.Rename(path, path+".old"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("rename the last daemon's log: %w", err)
		}
	}
	file, err := os.OpenFile(l.path(daemonLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("make the daemon's log: %w", err)
	}
	return file, nil
}

// truncate empties logs that have grown too large and keeps their end with the
// extension .old. The daemon has them open, so they cannot be renamed.
func (l logs) truncate() error {
	for _, name := range logNames {
		path := l.path(name)
		info, err := os.Stat(path)
		if err != nil || info.Size() <= maxLog {
			continue
		}
		data, err := readEnd(path, maxLog/16)
		if err == nil {
			err = os.WriteFile(path+".old", data, 0o600)
		}
		if err = errors.Join(err, os.Truncate(path, 0)); err != nil {
			return fmt.Errorf("truncate the logs in %s: %w", string(l), err)
		}
	}
	return nil
}

// tail returns the last lines of all logs, for errors.
func (l logs) tail() string {
	var parts []string
	for _, name := range logNames {
		data, err := readEnd(l.path(name), 4096)
		if err != nil {
			continue // not written yet
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

// serverUser returns the user whom a server serves: the one that the daemon logged
// when it started the server, or else the one as whom it runs. It is empty if
// neither is known.
func (l logs) serverUser(server int) string {
	for _, name := range serverLogs {
		data, err := readEnd(l.path(name), maxLog/16)
		if err != nil {
			continue
		}
		text, start := string(data), fmt.Sprintf("Starting new server %d for user ", server)
		if i := strings.LastIndex(text, start); i >= 0 {
			user, _, _ := strings.Cut(text[i+len(start):], "\n")
			if user != "" {
				return strings.TrimSpace(user)
			}
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join("/proc", strconv.Itoa(server)), &st); err != nil {
		return ""
	}
	return strconv.FormatUint(uint64(st.Uid), 10)
}

// exitedCleanly reports whether a server exited with status 0. It is true unless a
// log says otherwise.
func (l logs) exitedCleanly(server int) bool {
	clean := true
	for _, name := range serverLogs {
		data, err := readEnd(l.path(name), maxLog/16)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			_, how, _ := strings.Cut(line, fmt.Sprintf("Server %d ", server))
			if strings.HasPrefix(how, "exited") || strings.HasPrefix(how, "ended") {
				clean = strings.HasPrefix(how, "exited with status 0")
			}
		}
	}
	return clean
}

// logSizes are the sizes of serverLogs at some time, by name.
type logSizes map[string]int64

func (l logs) sizes() logSizes {
	sizes := logSizes{}
	for _, name := range serverLogs {
		if info, err := os.Stat(l.path(name)); err == nil {
			sizes[name] = info.Size()
		}
	}
	return sizes
}

// serverFailure returns a line logged since then in which the daemon says that a
// server failed. It only makes a failure known sooner.
func (l logs) serverFailure(since logSizes) string {
	for _, name := range serverLogs {
		data, err := readFrom(l.path(name), since[name])
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
