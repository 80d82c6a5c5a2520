// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// logs is the folder of a session's logs. They are for people: what clients do ends up in
// them, so nothing is decided by what they say.
type logs string

// daemonLog is what launcher and daemon print; the daemon writes the other logs.
const daemonLog = "daemon.log"

var logNames = []string{daemonLog, "control.log", "server.log"}

const (
	// maxLog bounds each log. A daemon writes a line for every command that it gets,
	// and more for what its clients do.
	maxLog = 2 << 20
	// keptLog is how much of a log is kept that has grown too large.
	keptLog = maxLog / 8
	// oldLog is the extension of what is kept.
	oldLog = ".old"
	// tailLines is how many lines of each log become part of an error.
	tailLines = 8
	// tailBytes is how much of a log is searched for them.
	tailBytes = 32 << 10
)

func (l logs) path(name string) string { return filepath.Join(string(l), name) }

// open opens a new daemonLog. The logs of the last daemon are kept with the
// extension .old, and nothing else: the next one needs room.
func (l logs) open() (*os.File, error) {
	entries, err := os.ReadDir(string(l))
	if err != nil {
		return nil, fmt.Errorf("find the last daemon's logs: %w", err)
	}
	if err := l.bound(); err != nil {
		return nil, err
	}
	for _, entry := range entries {
		name, path := entry.Name(), l.path(entry.Name())
		switch {
		case slices.Contains(logNames, name):
			err = os.Rename(path, path+oldLog)
		case !slices.Contains(logNames, strings.TrimSuffix(name, oldLog)):
			err = os.RemoveAll(path)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("make room for the daemon's log: %w", err)
		}
	}
	file, err := os.OpenFile(l.path(daemonLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("make the daemon's log: %w", err)
	}
	return file, nil
}

// bound empties logs that have grown too large and keeps their end with the extension
// .old. The daemon has them open, so they cannot be renamed.
func (l logs) bound() error {
	var errs []error
	for _, name := range logNames {
		if err := boundLog(l.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("bound the log %s: %w", l.path(name), err))
		}
	}
	return errors.Join(errs...)
}

func boundLog(path string) error {
	var st unix.Stat_t
	// What it takes, not its length: a daemon that does not append goes on where it was
	// and leaves a hole.
	if err := unix.Stat(path, &st); err != nil || st.Blocks*512 <= maxLog {
		return err
	}
	end, err := readEnd(path, keptLog)
	// Before anything is written: there may be no space.
	if err := errors.Join(err, os.Truncate(path, 0)); err != nil {
		return err
	}
	if err := os.WriteFile(path+oldLog, end, 0o600); !errors.Is(err, unix.ENOSPC) {
		return err
	}
	return nil
}

// ownQuery matches the lines that a daemon logs for each question of the supervisor.
var ownQuery = regexp.MustCompile(`(Accepting connection\.\.\.|NEW UI|UI closed|Cmd:get_.*)\s*$`)

// tail returns the last lines of all logs, for errors.
func (l logs) tail() string {
	var parts []string
	for _, name := range logNames {
		data, err := readEnd(l.path(name), tailBytes)
		if err != nil {
			continue // not written yet
		}
		lines := slices.DeleteFunc(strings.Split(strings.TrimSpace(string(data)), "\n"), ownQuery.MatchString)
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

// readEnd returns the last bytes of a file.
func readEnd(path string, most int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(file, max(0, info.Size()-most), most))
}
