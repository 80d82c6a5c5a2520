// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Socket identifies a socket in the file system. One that is made in its place is
// another.
type Socket struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
}

// IdentifySocket returns the socket at a path below a folder. It follows no symbolic
// link below the folder, and fails for everything that is not a socket.
func IdentifySocket(folder, name string) (Socket, error) {
	file, socket, err := openSocket(folder, name)
	if err != nil {
		return Socket{}, err
	}
	return socket, file.Close()
}

// Listener returns the socket at a path below a folder, as IdentifySocket does, and
// the process that listens on it. It connects to the socket and hangs up.
func Listener(ctx context.Context, folder, name string) (Socket, ID, error) {
	file, socket, err := openSocket(folder, name)
	if err != nil {
		return Socket{}, ID{}, err
	}
	defer func() { _ = file.Close() }()
	// Whatever is at the path by now, this is the socket that was opened.
	pid, err := Peer(ctx, filepath.Join(procRoot, "self/fd", strconv.Itoa(int(file.Fd()))))
	if err != nil {
		return Socket{}, ID{}, fmt.Errorf("connect to %s: %w", file.Name(), err)
	}
	if pid == 0 {
		return Socket{}, ID{}, fmt.Errorf("connect to %s: the process that listens is in another PID namespace", file.Name())
	}
	id, err := Identify(pid)
	if err != nil {
		return Socket{}, ID{}, fmt.Errorf("the process that listens on %s: %w", file.Name(), err)
	}
	return socket, id, nil
}

// openSocket opens the socket as a place in the file system.
func openSocket(folder, name string) (*os.File, Socket, error) {
	path := filepath.Join(folder, name)
	at, err := unix.Open(folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, Socket{}, &os.PathError{Op: "open", Path: folder, Err: err}
	}
	defer func() { _ = unix.Close(at) }()
	fd, err := unix.Openat2(at, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, Socket{}, &os.PathError{Op: "open", Path: path, Err: err}
	}
	file := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, Socket{}, errors.Join(&os.PathError{Op: "stat", Path: path, Err: err}, file.Close())
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, Socket{}, errors.Join(fmt.Errorf("%s is not a socket", path), file.Close())
	}
	return file, Socket{Device: st.Dev, Inode: st.Ino}, nil
}

// Peer returns the PID of the process that listens at a path.
func Peer(ctx context.Context, path string) (int, error) {
	var dialer net.Dialer
	// The type of socket that MPS has, and then the other one.
	c, err := dialer.DialContext(ctx, "unixpacket", path)
	if errors.Is(err, unix.EPROTOTYPE) {
		c, err = dialer.DialContext(ctx, "unix", path)
	}
	if err != nil {
		// Without the path, which says nothing to the reader.
		if inner := new(os.SyscallError); errors.As(err, &inner) {
			err = inner
		}
		return 0, err
	}
	defer func() { _ = c.Close() }()
	connection, ok := c.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%T is not a connection to a unix socket", c)
	}
	raw, err := connection.SyscallConn()
	if err != nil {
		return 0, err
	}
	var credentials *unix.Ucred
	var credentialsErr error
	err = raw.Control(func(fd uintptr) {
		// Of the process that called listen.
		credentials, credentialsErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, credentialsErr); err != nil {
		return 0, fmt.Errorf("who listens: %w", err)
	}
	return int(credentials.Pid), nil
}
