// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// link is the connection between a control daemon and one of its servers. Each
// message is one packet, and may carry the connection of a client.
type link struct {
	mu sync.Mutex // for sending
	c  *net.UnixConn
}

// order is a message to the server. All but the first, "config", and "client" are
// answered.
type order struct {
	ID     int     `json:"id,omitempty"`
	Op     string  `json:"op"`
	Config *config `json:"config,omitempty"`
	// PID and UID are the client's; PID is also the one that terminate is for.
	PID int `json:"pid,omitempty"`
	UID int `json:"uid,omitempty"`
	// Priority is what a client has that does not say, if Priorities says that there are any.
	Priority   priority `json:"priority,omitempty"`
	Priorities bool     `json:"priorities,omitempty"`
	// Key and Value are the arguments of settings.
	Key        string  `json:"key,omitempty"`
	Bytes      uint64  `json:"bytes,omitempty"`
	Percentage float64 `json:"percentage,omitempty"`
}

// answer is a message from the server: to an order, or, without an ID, that the
// server is ready.
type answer struct {
	ID   int    `json:"id,omitempty"`
	Text string `json:"text,omitempty"`
}

// config is what a server starts with.
type config struct {
	UID        int          `json:"uid"`
	MultiUser  bool         `json:"multiUser"`
	Percentage float64      `json:"percentage"`
	Memory     memoryLimits `json:"memory"`
}

const maxPacket = 64 << 10

// linkPair makes both ends. The second is for another process.
func linkPair() (*link, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("connect daemon and server: %w", err)
	}
	mine := os.NewFile(uintptr(fds[0]), "server")
	theirs := os.NewFile(uintptr(fds[1]), "daemon")
	l, err := newLink(mine)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return l, theirs, nil
}

// newLink takes the file over.
func newLink(f *os.File) (*link, error) {
	c, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("connect daemon and server: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("connect daemon and server: %T is not a unix socket", c)
	}
	return &link{c: u}, nil
}

func (l *link) close() { _ = l.c.Close() }

// send sends a message, with the connection of a client if that is not nil.
func (l *link) send(message any, client *net.UnixConn) error {
	data, err := json.Marshal(message)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if client == nil {
		_, _, err = l.c.WriteMsgUnix(data, nil, nil)
		return err
	}
	raw, err := client.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) { _, _, sendErr = l.c.WriteMsgUnix(data, syscall.UnixRights(int(fd)), nil) })
	return errors.Join(err, sendErr)
}

// receive waits for a message; io.EOF when the other side is gone.
func (l *link) receive(message any) (client *net.UnixConn, err error) {
	data, rights := make([]byte, maxPacket), make([]byte, syscall.CmsgSpace(4))
	n, rn, _, _, err := l.c.ReadMsgUnix(data, rights)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF
	}
	if rn > 0 {
		if client, err = received(rights[:rn]); err != nil {
			return nil, err
		}
	}
	return client, json.Unmarshal(data[:n], message)
}

func received(rights []byte) (*net.UnixConn, error) {
	messages, err := syscall.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := syscall.ParseUnixRights(&messages[i])
		if err != nil {
			return nil, err
		}
		for _, fd := range fds {
			syscall.CloseOnExec(fd)
			f := os.NewFile(uintptr(fd), "client")
			c, err := net.FileConn(f)
			if err := errors.Join(err, f.Close()); err != nil {
				return nil, err
			}
			if u, ok := c.(*net.UnixConn); ok {
				return u, nil
			}
			_ = c.Close()
		}
	}
	return nil, errors.New("no connection of a client came with the message")
}

// peer returns the process at the other end of a connection. The process id is 0 where
// it has none in this PID namespace.
func peer(c *net.UnixConn) (pid, uid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *syscall.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err := errors.Join(err, credErr); err != nil {
		return 0, 0, err
	}
	return int(cred.Pid), int(cred.Uid), nil
}
