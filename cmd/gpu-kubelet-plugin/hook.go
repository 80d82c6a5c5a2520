// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/google/renameio/v2"
)

// installHook copies the CDI hook program to a path that exists on the host too,
// because the container runtime runs hooks outside of the driver's container. A
// copy that is already right is left alone; a new one replaces it in one step,
// since a container may be starting at this moment.
func installHook(from, to string) error {
	want, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("read the CDI hook program: %w", err)
	}
	have, err := os.ReadFile(to)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read the installed CDI hook program: %w", err)
	}
	if err == nil && bytes.Equal(have, want) {
		info, err := os.Stat(to)
		if err == nil && info.Mode().Perm() == hookMode {
			return nil
		}
	}
	if err := replaceFile(to, want); err != nil {
		return fmt.Errorf("install the CDI hook program: %w", err)
	}
	return nil
}

func replaceFile(path string, content []byte) (err error) {
	// Neither the umask nor the mode of an old file matters.
	file, err := renameio.NewPendingFile(path, renameio.WithStaticPermissions(hookMode))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Cleanup()) }()
	if _, err := file.Write(content); err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
}

const hookMode = 0o755
