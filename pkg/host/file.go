// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ReplaceFile writes a file atomically and durably: after a crash or a power loss
// it has either the old or the new content in full, and the new one once the call
// has returned.
//
// The temporary file has a fixed name (see TemporaryName), so that one which a
// killed process leaves behind is overwritten by the next write of the same file or
// removed by RemoveFile. Writers of one file must therefore exclude each other.
func ReplaceFile(path string, data []byte, mode fs.FileMode) error {
	temporary := TemporaryName(path)
	if err := writeSynced(temporary, data, mode); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), ignoreAbsent(os.Remove(temporary)))
	}
	if err := os.Rename(temporary, path); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), ignoreAbsent(os.Remove(temporary)))
	}
	return syncFolder(filepath.Dir(path))
}

// RemoveFile removes what ReplaceFile made, durably. An absent file is a success.
func RemoveFile(path string) error {
	err := errors.Join(ignoreAbsent(os.Remove(TemporaryName(path))), ignoreAbsent(os.Remove(path)))
	if err != nil {
		return err
	}
	return ignoreAbsent(syncFolder(filepath.Dir(path)))
}

// TemporaryName returns where ReplaceFile writes before it renames. It starts with
// a dot and does not end like the file itself, so that directory scans skip it.
func TemporaryName(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
}

func writeSynced(path string, data []byte, mode fs.FileMode) (err error) {
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
	return file.Sync()
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
