// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxSocketPath is how many bytes the path of a unix socket may have: the size of sun_path
// less the final zero.
const MaxSocketPath = 107

// ListenUnix listens on a unix socket that only this process's user may connect to. It
// replaces a socket that is there, of a process of which the caller knows that it has
// ended, but no other file.
func ListenUnix(ctx context.Context, path string) (net.Listener, error) {
	if len(path) > MaxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path has %d bytes, a socket's has at most %d", path, len(path), MaxSocketPath)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		if err := ignoreAbsent(os.Remove(path)); err != nil {
			return nil, fmt.Errorf("remove an earlier socket: %w", err)
		}
	}
	config := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		// The file gets the mode that the socket has when it is bound, so there is no time
		// at which others may connect.
		var chmod error
		err := socket.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmod)
	}}
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on a unix socket: %w", err)
	}
	return listener, nil
}
