// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package program keeps copies of hook programs where container runtimes can run them:
// on the host, outside of the driver's container.
//
// The name of a copy has a hash of its content, so that an upgrade puts another program
// beside it and never changes one that a spec names, or that is running. A plugin that starts
// removes the copies of earlier ones that no spec names any more.
package program

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/node/host"
)

const mode = 0o755

// ourName is a name that Install gives, or that of a copy which a killed process has not finished.
var ourName = regexp.MustCompile(`^([^.].*-[0-9a-f]{12}|\..+-[0-9a-f]{12}\.tmp)$`)

// Folder is where the copies are. Several processes may use one, and each keeps what it
// has installed there until it ends: the file is locked as long as that, so that no other
// one takes it for unused before a spec names it.
type Folder struct {
	path string
	// held are the locked files. Closed ones have no lock, so Close says when nobody needs them any more.
	held []*os.File
}

// Open makes the folder if it does not exist.
func Open(path string) (*Folder, error) {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, fmt.Errorf("folder for hook programs: %w", err)
	}
	return &Folder{path: path}, nil
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
	unlock, err := f.lock()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	file, err := open(path, content)
	if err != nil {
		return "", fmt.Errorf("install the hook program %s: %w", program, err)
	}
	f.held = append(f.held, file)
	// Nobody removes it meanwhile, which takes the lock of the folder.
	if err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return "", fmt.Errorf("lock the hook program %s: %w", path, err)
	}
	return path, nil
}

// lock keeps other processes from installing and removing. The lock is on the
// folder itself, so that it leaves no file behind.
func (f *Folder) lock() (unlock func() error, err error) {
	lock := flock.New(f.path, flock.SetFlag(os.O_RDONLY))
	if err := lock.Lock(); err != nil {
		return nil, fmt.Errorf("wait for another instance that installs hook programs: %w", err)
	}
	return lock.Unlock, nil
}

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

// RemoveUnused removes copies that no process holds and no spec names. named returns the paths that specs name; it must be called before
// this process changes specs: a runtime may be making a container from one that is there.
func (f *Folder) RemoveUnused(ctx context.Context, named func() (map[string]bool, error)) {
	if err := f.removeUnused(ctx, named); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot remove copies of hook programs that are not used")
	}
}

func (f *Folder) removeUnused(ctx context.Context, named func() (map[string]bool, error)) (err error) {
	unlock, err := f.lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return fmt.Errorf("folder for hook programs: %w", err)
	}
	var free []string
	for _, entry := range entries {
		if !ourName.MatchString(entry.Name()) {
			continue
		}
		path := filepath.Join(f.path, entry.Name())
		file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("hook program: %w", err)
		}
		defer func() { _ = file.Close() }()
		// They are locked before the specs are read: a process that ends in between has written its last spec.
		switch err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			free = append(free, path)
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock the hook program %s: %w", path, err)
		}
	}
	names, err := named()
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range free {
		if names[path] {
			continue
		}
		if err := host.RemoveFile(path); err != nil {
			errs = append(errs, fmt.Errorf("hook program: %w", err))
			continue
		}
		klog.FromContext(ctx).Info("Removed a hook program that no CDI spec names any more", "path", path)
	}
	return errors.Join(errs...)
}

// Close gives up what this process has installed, as the end of the process does.
func (f *Folder) Close() {
	for _, file := range f.held {
		_ = file.Close()
	}
}
