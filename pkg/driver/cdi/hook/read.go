// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// readFile reads a file like openRegular, and refuses more than limit bytes.
func readFile(path string, limit int64) ([]byte, error) {
	file, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	data, err := readAll(file, limit)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", quote.Text(path), short(err))
	}
	return data, nil
}

// openRegular opens a file that a tenant may have had a hand in: it neither follows a
// symbolic link nor waits for a pipe or a device.
func openRegular(path string) (*os.File, error) {
	before, err := os.Lstat(path)
	if err != nil {
		return nil, short(err)
	}
	if !before.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is a %s: want a regular file", quote.Text(path), kind(before.Mode()))
	}
	// What is there by now may be something else.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, short(err)
	}
	if opened, err := file.Stat(); err != nil || !os.SameFile(before, opened) {
		_ = file.Close()
		return nil, errors.Join(fmt.Errorf("%s was replaced meanwhile", quote.Text(path)), err)
	}
	return file, nil
}

// readAll refuses more than limit bytes.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("it has more than %d bytes", limit)
	}
	return data, err
}

// short quotes the path of an error.
func short(err error) error {
	if pathError := (*os.PathError)(nil); errors.As(err, &pathError) {
		return fmt.Errorf("%s %s: %w", pathError.Op, quote.Text(pathError.Path), pathError.Err)
	}
	return err
}

func kind(mode os.FileMode) string {
	switch mode.Type() {
	case os.ModeSymlink:
		return "symbolic link"
	case os.ModeDir:
		return "folder"
	case os.ModeNamedPipe:
		return "pipe"
	case os.ModeSocket:
		return "socket"
	}
	return "device"
}
