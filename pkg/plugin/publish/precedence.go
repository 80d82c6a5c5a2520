// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// precedence decides which of several instances of the plugin on this node
// publishes: during an upgrade two of them run, each with its own idea of the GPUs and
// of the policy. It is the one that began last. When that one ends, however it does,
// the one before it takes over again.
//
// Each instance locks a byte of a file beyond those that others have locked. The
// kernel releases the byte with the process, so that nothing is left to clean up.
type precedence struct {
	// path of the file. Without one there is a single instance.
	path   string
	file   *os.File
	number int64
}

// mine reports whether there is no newer instance. The first call makes this
// instance the newest.
func (p *precedence) mine() (bool, error) {
	if p.path == "" {
		return true, nil
	}
	if p.file == nil {
		if err := p.begin(); err != nil {
			return false, fmt.Errorf("take precedence over older instances with %s: %w", p.path, err)
		}
	}
	newer, err := locked(p.file, byteRange(p.number+1, 0))
	if err != nil {
		return false, fmt.Errorf("look for newer instances in %s: %w", p.path, err)
	}
	return newer == nil, nil
}

func (p *precedence) begin() error {
	file, err := os.OpenFile(p.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	for number := int64(1); ; {
		other, err := locked(file, byteRange(number, 0))
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

// giveWay lets an older instance publish, and reports whether there is one. The next
// call of mine makes this instance the newest again.
func (p *precedence) giveWay() bool {
	if p.file == nil || p.number == 1 {
		return false
	}
	older, err := locked(p.file, byteRange(1, p.number-1))
	if err != nil || older == nil {
		return false
	}
	p.end()
	return true
}

// end gives up the place.
func (p *precedence) end() {
	if p.file != nil {
		_ = p.file.Close()
		p.file = nil
	}
}

// locked returns the first part of a range that another instance holds, or nil.
func locked(file *os.File, lock *unix.Flock_t) (*unix.Flock_t, error) {
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
