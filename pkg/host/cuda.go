// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
)

const cudaLibrary = "libcuda.so.1"

// CUDALibraryPath finds the CUDA driver's library in the driver root, and resolves links
// to it. The error wraps fs.ErrNotExist when there is none, as with a driver that was
// installed without its compute libraries.
func (r Roots) CUDALibraryPath() (string, error) {
	root := r.Complete().Driver
	for _, folder := range libraryFolders {
		file, info, err := statIn(root, filepath.Join(folder, cudaLibrary))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("look for the CUDA library in driver root %q: %w", root, err)
		}
		if info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("no %s in the library folders of driver root %q: %w", cudaLibrary, root, fs.ErrNotExist)
}
