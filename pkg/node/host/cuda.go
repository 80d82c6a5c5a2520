// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

const cudaLibrary = "libcuda.so.1"

// CUDALibraryPath finds the CUDA driver's library in the driver root, and resolves links
// to it. The error wraps fs.ErrNotExist when there is none, as with a driver that was
// installed without its compute libraries.
func (r Roots) CUDALibraryPath() (string, error) {
	_, file, err := r.library(cudaLibrary)
	return file, err
}
