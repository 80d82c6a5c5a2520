// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"os"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu/call"
)

// Within returns the roots for reads that take no longer than ctx. Others take no longer than a call may.
func (r Roots) Within(ctx context.Context) Roots {
	r.ctx = ctx
	return r
}

// read reads what the NVIDIA driver or a bus answers for, which may never happen. Reads of one thing, of a GPU if
// there is an address, are made one after the other.
func read[T any](r Roots, pciAddress, at, name string, f func() (T, error)) (T, error) {
	ctx := r.ctx
	if ctx == nil {
		ctx = context.Background()
	}
	return call.Read(ctx, r.Calls.Of(pciAddress, at), name, f)
}

// valueOf returns the value in the line "<field>: <value>" of a file of the NVIDIA driver.
func valueOf(data []byte, field string) (value string, found bool) {
	for line := range strings.Lines(string(data)) {
		if name, value, is := strings.Cut(line, ":"); is && strings.TrimSpace(name) == field {
			return strings.TrimSpace(value), true
		}
	}
	return "", false
}

// driverFile reads a file of the NVIDIA driver.
func (r Roots) driverFile(pciAddress, at, path string) ([]byte, error) {
	return read(r, pciAddress, at, "read of "+path, func() ([]byte, error) { return os.ReadFile(path) })
}
