// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// HungFile is a file whose reading does not return: a pipe into which nobody writes.
type HungFile struct {
	path, pipe string
	content    []byte
	writers    []*os.File
	back       bool
}

// InformationFile is the file in /proc about a GPU. The kernel module takes locks of its own for those who read it.
func (n *GPUs) InformationFile(t testing.TB, gpu int) string {
	t.Helper()
	return filepath.Join(n.Root, "proc/driver/nvidia/gpus", n.Address(t, gpu), "information")
}

// HangFile makes a file one that hangs, until the test ends at the latest. A file that is not there is one that is empty.
func HangFile(t testing.TB, path string) *HungFile {
	t.Helper()
	h := &HungFile{path: path, pipe: path + ".pipe"}
	var err error
	h.content, err = os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err = errors.Join(err, unix.Mkfifo(h.pipe, 0o644), os.Rename(h.pipe, path)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.ComeBack(t) })
	return h
}

// UntilRead waits until the process waits for what the file says.
func (h *HungFile) UntilRead(t testing.TB, p *Process) {
	t.Helper()
	p.Until(t, "somebody who reads "+h.path, func(context.Context) error { return h.open(h.path) })
}

// open opens the pipe to write, which fails while nobody wants to read it. Who does waits for a text from then on.
func (h *HungFile) open(path string) error {
	writer, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		h.writers = append(h.writers, writer)
	}
	return err
}

// ComeBack lets the file be read again.
func (h *HungFile) ComeBack(t testing.TB) {
	t.Helper()
	if h.back {
		return
	}
	h.back = true
	// Those to come get the file, those that wait get what it says.
	err := errors.Join(os.Rename(h.path, h.pipe), os.WriteFile(h.path+".new", h.content, 0o644), os.Rename(h.path+".new", h.path))
	_ = h.open(h.pipe)
	for _, w := range h.writers {
		_, _ = w.Write(h.content)
		err = errors.Join(err, w.Close())
	}
	if err != nil {
		t.Errorf("let %s be read again: %v", h.path, err)
	}
}
