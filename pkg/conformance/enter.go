// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps/supervisor"
)

const (
	// entered is set in the environment of the process that Enter has made of this one, to
	// the descriptors of the files that it has got.
	entered = "PARTAGE_CONFORMANCE_ENTERED"
	// workSize bounds what MPS may write, in bytes.
	workSize = 1 << 30
	self     = "/proc/self/exe"
)

// LaunchCommand is the sub-command by which part B runs this program again to call Launch
// with the other arguments. A program that runs part B must have it.
const LaunchCommand = supervisor.LaunchCommand

// Launch replaces this process by a program of MPS, as the MPS supervisor starts it.
func Launch(args []string) error { return supervisor.Launch(args) }

// Alone makes this the only run on the node that does more than read: two would end each
// other's MPS and undo each other's changes. It ends with the process, or with release.
func Alone(dataDir string) (release func(), err error) {
	path := filepath.Join(dataDir, "conformance", "lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("keep other runs away: %w", err)
	}
	file := flock.New(path)
	alone, err := file.TryLock()
	if err != nil {
		return nil, fmt.Errorf("keep other runs away: %w", err)
	}
	if !alone {
		return nil, fmt.Errorf("another run with --mps or --intrusive is under way on this node: it has locked %s", path)
	}
	return func() { _ = file.Unlock() }, nil // the process ends soon
}

// Entered returns the files that were given to Enter, if this is the process that Enter has
// made.
func Entered() (files []*os.File, ok bool) {
	value, ok := os.LookupEnv(entered)
	if !ok {
		return nil, false
	}
	for text := range strings.FieldsSeq(value) {
		fd, err := strconv.Atoi(text)
		if err != nil {
			continue // it is not Enter's
		}
		unix.CloseOnExec(fd)
		files = append(files, os.NewFile(uintptr(fd), "file "+text))
	}
	return files, true
}

// Enter makes a place for the files of MPS that is gone with this process, however it ends: a
// tmpfs at the folder, in a mount namespace of its own. A mount namespace belongs to a
// thread, so the process runs itself again, and has the files open then as it has now. Where
// the folder cannot be made, because the root of a container is read-only, the one that it is
// in is hidden by the tmpfs.
func Enter(folder string, files ...*os.File) error {
	if _, ok := os.LookupEnv(entered); ok {
		return nil
	}
	at := folder
	if err := os.MkdirAll(folder, 0o755); errors.Is(err, unix.EROFS) {
		at = filepath.Dir(folder)
	} else if err != nil {
		return fmt.Errorf("make a folder for MPS: %w", err)
	}
	var kept []string
	for _, file := range files {
		fd := file.Fd()
		if _, err := unix.FcntlInt(fd, unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("keep %s open: %w", file.Name(), err)
		}
		kept = append(kept, strconv.Itoa(int(fd)))
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace, for which root is needed: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	if err := unix.Mount("partage-conformance", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=755,size=%d", workSize)); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", at, err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("make a folder for MPS: %w", err)
	}
	environment := append(os.Environ(), entered+"="+strings.Join(kept, " "))
	return fmt.Errorf("run %s again: %w", self, unix.Exec(self, os.Args, environment))
}
