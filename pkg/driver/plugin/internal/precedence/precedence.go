// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package precedence decides which of several instances of the plugin on a node does what only
// one of them should do.
package precedence

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Precedence decides which of several instances of the plugin on this node has its way:
// during an upgrade two of them run, each with its own idea of the GPUs and of the policy.
// It is the one that began last. When that one ends, however it does, the one before it
// takes over again. Its methods may be called concurrently.
//
// Each instance locks a byte of a file beyond those that others have locked. The
// kernel releases the byte with the process, so that nothing is left to clean up.
type Precedence struct {
	// path of the file.
	path string

	mu     sync.Mutex
	file   *os.File
	number int64
}

// New returns the precedence that a file decides about.
func New(path string) *Precedence { return &Precedence{path: path} }

// Mine reports whether there is no newer instance. The first call makes this
// instance the newest.
func (p *Precedence) Mine() (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.file == nil {
		if err := p.begin(); err != nil {
			return false, fmt.Errorf("take precedence over older instances with %s: %w", p.path, err)
		}
	}
	newer, err := locked(p.file, p.number+1)
	if err != nil {
		return false, fmt.Errorf("look for newer instances in %s: %w", p.path, err)
	}
	return newer == nil, nil
}

// Superseded reports whether it is known that there is a newer instance than this one, if it has begun.
func (p *Precedence) Superseded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.file == nil {
		return false
	}
	newer, err := locked(p.file, p.number+1)
	return err == nil && newer != nil
}

func (p *Precedence) begin() error {
	file, err := os.OpenFile(p.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	for number := int64(1); ; {
		other, err := locked(file, number)
		if err == nil && other != nil {
			number = other.Start + other.Len
			continue
		}
		if err == nil {
			err = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, byteRange(number, 1))
		}
		switch {
		case err == nil:
			p.file, p.number = file, number
			return nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return errors.Join(err, file.Close())
		}
	}
}

// End gives up the place.
func (p *Precedence) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.file != nil {
		_ = p.file.Close()
		p.file = nil
	}
}

// locked returns the first part of the rest of a file that another instance holds, or nil.
func locked(file *os.File, start int64) (*unix.Flock_t, error) {
	lock := byteRange(start, 0)
	if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, lock); err != nil {
		return nil, err
	}
	if lock.Type == unix.F_UNLCK {
		return nil, nil
	}
	return lock, nil
}

// byteRange is for writing; a length of 0 has no end.
func byteRange(start, length int64) *unix.Flock_t {
	return &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: start, Len: length}
}
