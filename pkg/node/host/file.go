// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ReplaceFile writes a file atomically and durably: after a crash or a power loss
// it has either the old or the new content in full, and the new one once the call
// has returned.
//
// The temporary file has a fixed name (see TemporaryName), so that one which a
// killed process leaves behind is overwritten by the next write of the same file or
// removed by RemoveFile. Writers of one file must therefore exclude each other.
func ReplaceFile(path string, data []byte, mode fs.FileMode) error {
	if err := replace(path, data, mode, (*os.File).Sync, os.Rename); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// ReplaceUnsynced is ReplaceFile for what need not outlive the machine: all processes see
// the old or the new content in full, whatever process is killed, but a power loss may damage the
// file. It does not wait for the disk.
func ReplaceUnsynced(path string, data []byte, mode fs.FileMode) error {
	return replace(path, data, mode, func(*os.File) error { return nil }, exchange)
}

// exchange is os.Rename for what need not be on the disk: where a file replaces another one by its name, ext4 begins to write it
// there, and who removes it soon waits for that.
func exchange(from, to string) error {
	if old, err := os.Lstat(to); err != nil || !old.Mode().IsRegular() ||
		unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE) != nil {
		return os.Rename(from, to)
	}
	_ = os.Remove(from) // where the old content stays under this name it is overwritten by the next write, as after a kill
	return nil
}

// RemoveFile removes what ReplaceFile made, durably. An absent file is a success.
func RemoveFile(path string) error {
	if err := RemoveUnsynced(path); err != nil {
		return err
	}
	return ignoreAbsent(syncFolder(filepath.Dir(path)))
}

// RemoveUnsynced is RemoveFile without waiting for the disk: after a power loss the file
// may be there again.
func RemoveUnsynced(path string) error {
	return errors.Join(ignoreAbsent(os.Remove(TemporaryName(path))), ignoreAbsent(os.Remove(path)))
}

// TemporaryName returns where ReplaceFile writes before it renames. It starts with
// a dot and does not end like the file itself, so that directory scans skip it.
func TemporaryName(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
}

// FinalName returns the name of the file that one with a name of TemporaryName becomes, and others as they are.
func FinalName(name string) string {
	if hidden, is := strings.CutSuffix(name, ".tmp"); is && strings.HasPrefix(name, ".") {
		return hidden[1:]
	}
	return name
}

func replace(path string, data []byte, mode fs.FileMode, sync func(*os.File) error, rename func(from, to string) error) error {
	temporary := TemporaryName(path)
	err := writeTo(temporary, data, mode, sync)
	if err == nil {
		err = rename(temporary, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), ignoreAbsent(os.Remove(temporary)))
	}
	return nil
}

func writeTo(path string, data []byte, mode fs.FileMode, sync func(*os.File) error) (err error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := file.Close(); err == nil {
			err = closeErr
		}
	}()
	if _, err := file.Write(data); err != nil {
		return err
	}
	// Independent of the umask.
	if err := file.Chmod(mode); err != nil {
		return err
	}
	return sync(file)
}

func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := folder.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync folder %s: %w", path, err), folder.Close())
	}
	return folder.Close()
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
