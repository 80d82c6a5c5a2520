// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package program keeps copies of hook programs where container runtimes can run them:
// on the host, outside of the driver's container.
//
// The name of a copy has a hash of its content, so that an upgrade puts another program
// beside it and never changes one that a spec names, or that is running. Copies that no
// spec names any more are removed.
package program

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host"
)

const mode = 0o755

// copyName is a name that Install gives, and unfinishedName one that it gives before.
var (
	copyName       = regexp.MustCompile(`^[^.].*-[0-9a-f]{12}$`)
	unfinishedName = regexp.MustCompile(`^\..+-[0-9a-f]{12}\.tmp$`)
)

// Folder is where the copies are. Several processes may use one, and each keeps what it
// has installed there until it ends: the file is locked as long as that, so that no other
// one takes it for unused before a spec names it.
type Folder struct {
	path    string
	earlier []string

	mu sync.Mutex
	// held are the locked files of this process, by their path.
	held map[string]*os.File
	// unused is when a copy was first seen that no spec named.
	unused map[string]time.Time
}

// Open makes the folder if it does not exist. earlier are the paths of copies that
// versions without hashes have made elsewhere; they are removed like the others.
func Open(path string, earlier ...string) (*Folder, error) {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, fmt.Errorf("folder for hook programs: %w", err)
	}
	return &Folder{path: path, earlier: earlier, held: map[string]*os.File{}, unused: map[string]time.Time{}}, nil
}

// Install copies a program and returns the path of the copy, which stays until this
// process ends and no spec names it any more. A copy that is there and intact is used.
func (f *Folder) Install(program string) (path string, err error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return "", fmt.Errorf("read the hook program: %w", err)
	}
	sum := sha256.Sum256(content)
	path = filepath.Join(f.path, filepath.Base(program)+"-"+hex.EncodeToString(sum[:6]))
	f.mu.Lock()
	defer f.mu.Unlock()
	folder := f.folderLock()
	if err := folder.Lock(); err != nil {
		return "", fmt.Errorf("wait for another instance that installs hook programs: %w", err)
	}
	defer func() { err = errors.Join(err, folder.Unlock()) }()
	if err := f.removeUnfinished(); err != nil {
		return "", err
	}
	file, err := open(path, content)
	if err != nil {
		return "", fmt.Errorf("install the hook program %s: %w", program, err)
	}
	// Nobody removes it meanwhile, which takes the lock of the folder.
	if err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return "", errors.Join(fmt.Errorf("lock the hook program %s: %w", path, err), file.Close())
	}
	if before := f.held[path]; before != nil {
		_ = before.Close()
	}
	f.held[path] = file
	return path, nil
}

// folderLock keeps other processes from installing and removing. The lock is on the
// folder itself, so that it leaves no file behind.
func (f *Folder) folderLock() *flock.Flock { return flock.New(f.path, flock.SetFlag(os.O_RDONLY)) }

// open opens a copy. One that is missing or damaged is made anew, as another file, since
// a container may be starting right now.
func open(path string, content []byte) (*os.File, error) {
	if file, err := openIntact(path, content); err == nil {
		return file, nil
	}
	if err := host.ReplaceFile(path, content, mode); err != nil {
		return nil, err
	}
	return openIntact(path, content)
}

// removeUnfinished removes what processes left that were killed while they made a copy.
// The caller holds the folder's lock.
func (f *Folder) removeUnfinished() error {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return fmt.Errorf("folder for hook programs: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		if unfinishedName.MatchString(entry.Name()) {
			errs = append(errs, os.Remove(filepath.Join(f.path, entry.Name())))
		}
	}
	return errors.Join(errs...)
}

// openIntact opens a copy, and fails if it is not what Install makes.
func openIntact(path string, content []byte) (file *os.File, err error) {
	file, err = os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode() != mode {
		return nil, fmt.Errorf("%s has mode %v: want a regular file with %v", path, info.Mode(), fs.FileMode(mode))
	}
	have, err := io.ReadAll(io.LimitReader(file, int64(len(content))+1))
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(have, content) {
		return nil, fmt.Errorf("%s has another content", path)
	}
	return file, nil
}

// Close gives up what this process has installed, as the end of the process does.
func (f *Folder) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for path, file := range f.held {
		_ = file.Close()
		delete(f.held, path)
	}
}
