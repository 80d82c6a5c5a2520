// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/host"
)

// Files changes files. Tests inject faults here. A write is seen by all processes at once, also if its own is killed then;
// it need not outlive the machine, since no call waits for the disk.
type Files interface {
	// Replace puts the content in place in one piece.
	Replace(path string, data []byte) error
	// WriteHead writes over the beginning of a file, and takes no space.
	WriteHead(path string, data []byte) error
	// Remove removes what Replace made. An absent file is a success.
	Remove(path string) error
}

// OS is the file system of this machine.
type OS struct{}

var _ Files = OS{}

// Replace implements Files. Claim names are nobody else's business.
func (OS) Replace(path string, data []byte) error { return host.ReplaceUnsynced(path, data, 0o600) }

// WriteHead implements Files.
func (OS) WriteHead(path string, data []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(data, 0)
	return errors.Join(err, file.Close())
}

// Remove implements Files.
func (OS) Remove(path string) error { return host.RemoveUnsynced(path) }

// NoSpace reports whether a write failed because the disk, or a quota on it, is full.
func NoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// file is one file of a claim.
type file struct {
	path, boot string
	// data is nil where there is no file.
	data []byte
	// head has no GPUs where not even that can be read.
	head head
	// record is nil in a file that says only when its claim was released, and with an error.
	record *Record
	err    error
}

func read(path string, uid types.UID) file {
	f := file{path: path, boot: strings.Split(filepath.Base(path), ".")[1]}
	if f.data, f.err = os.ReadFile(path); f.err == nil {
		f.head, f.record, f.err = parse(f.data, uid)
	}
	if f.record != nil {
		f.record.BootID = f.boot
	}
	return f
}

// line returns the head as it is in the file.
func (f *file) line() string {
	line, _, _ := bytes.Cut(f.data, []byte("\n"))
	return string(line)
}

// write makes the file say what is known of a claim. It needs no space where only the head changes.
func (f *file) write(files Files, r *Record, released time.Duration) error {
	if r == nil {
		stone := head{state: gone, released: released, writes: f.head.writes + 1}
		switch {
		case released == 0:
			return files.Remove(f.path)
		case f.data == nil:
			return files.Replace(f.path, stone.line())
		}
		return files.WriteHead(f.path, stone.line())
	}
	h, body, err := encode(r, released)
	if err != nil {
		return err
	}
	h.writes = f.head.writes + 1
	if _, was, err := parse(f.data, r.Claim.UID); err == nil && was != nil && bytes.Equal(encodeBody(was), body) {
		h.gpus, h.body = f.head.gpus, f.head.body // what another version wrote stays
		return files.WriteHead(f.path, h.line())
	}
	return files.Replace(f.path, append(h.line(), body...))
}
