// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// leastOpenFiles is how many files NVIDIA asks that MPS may open at least. With less, its
	// server fails with "failed to create/open SHM segment" once it has enough clients (MPS
	// documentation, "Troubleshooting Guide"). containerd 2.0 and later give 1024.
	leastOpenFiles = 16384
	// openFiles is what daemons and servers get: room to spare, and few enough for a program
	// that closes all descriptors it might have. On some nodes the limit is 10^9.
	openFiles = 4 * leastOpenFiles
)

// allowOpenFiles lets the programs that this one starts have openFiles files open. Without CAP_SYS_RESOURCE it goes up to the
// hard limit, and returns an error if that is less than NVIDIA asks for.
func allowOpenFiles() error {
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	// Set even if the limit is high enough: Go has raised this process's, and sets it back for
	// the programs that it starts unless it was changed.
	err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: openFiles, Max: max(now.Max, openFiles)})
	if err == nil {
		return nil
	}
	if allErr := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: now.Max, Max: now.Max}); allErr != nil {
		return fmt.Errorf("raise the limit of open files to the hard limit of %d: %w", now.Max, allErr)
	}
	if now.Max < leastOpenFiles {
		return fmt.Errorf("MPS may have only %d files open and NVIDIA asks for at least %d: with many clients its server will fail; "+
			"give the supervisor's container CAP_SYS_RESOURCE, or raise LimitNOFILE of the node's container runtime: %w", now.Max, leastOpenFiles, err)
	}
	return nil
}
