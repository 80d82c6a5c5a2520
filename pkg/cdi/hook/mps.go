// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// restartTime is how long a daemon that has just ended may take to come back.
	restartTime = 2 * time.Second

	dialInterval = 20 * time.Millisecond
)

// CheckMPSClient refuses a container that would not be held to the limits of its MPS
// session. input is what the runtime writes to hooks; control is the path of the
// daemon's socket on the host.
func CheckMPSClient(ctx context.Context, input io.Reader, control, session string) error {
	c, err := readContainer(input)
	if err != nil {
		return fmt.Errorf("MPS session %s: %w", session, err)
	}
	if err := CheckMarkers(c.Process.Env); err != nil {
		return err
	}
	if err := reach(ctx, control); err != nil {
		return fmt.Errorf("the MPS control daemon of session %s cannot be reached at %s, so this container would run without its limits: "+
			"see the log of the mps-supervisor on this node; the container starts once the session runs again: %w", session, control, err)
	}
	return nil
}

// reach connects to the socket and hangs up.
func reach(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, restartTime)
	defer cancel()
	ticker := time.NewTicker(dialInterval)
	defer ticker.Stop()
	for {
		err := connect(ctx, path)
		if err == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return err
		}
	}
}

// connect tries the type of socket that MPS has, and then the other one.
func connect(ctx context.Context, path string) error {
	var dialer net.Dialer
	connection, err := dialer.DialContext(ctx, "unixpacket", path)
	if errors.Is(err, unix.EPROTOTYPE) {
		connection, err = dialer.DialContext(ctx, "unix", path)
	}
	if err != nil {
		return err
	}
	return connection.Close()
}
