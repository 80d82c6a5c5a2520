// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Nodes are the device nodes that a process has open.
type Nodes []*os.File

// Open opens the nodes of devices below root as a process does that uses them: that
// of each GPU and, as far as they are there, those of a partition. There is no driver
// behind them, so they are open as places in the file system only.
func Open(root string, devices ...Device) (Nodes, error) {
	var nodes Nodes
	for _, d := range devices {
		names := []string{fmt.Sprintf("nvidia%d", d.Minor)}
		if d.Compute >= 0 {
			minor := capability(d.Minor, d.Instance)
			for _, m := range []int{minor, minor + 1 + d.Compute} {
				if name := fmt.Sprintf("nvidia-caps/nvidia-cap%d", m); present(root, name) {
					names = append(names, name)
				}
			}
		}
		for _, name := range names {
			path := filepath.Join(root, "dev", name)
			fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), nodes.Close())
			}
			nodes = append(nodes, os.NewFile(uintptr(fd), path))
		}
	}
	return nodes, nil
}

// Close closes them.
func (n Nodes) Close() error {
	var errs []error
	for _, f := range n {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
