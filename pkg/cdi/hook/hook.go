// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package hook is the OCI hook of containers that are to be clients of MPS. A CUDA
// program that cannot reach its control daemon runs without MPS and without limits,
// and says nothing. So a container does not start unless the daemon can be reached,
// and unless it is clear which one.
//
// It is a createContainer hook: the runtime runs it after the container's
// namespaces were made and before the root changes, so that paths are the host's.
package hook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Command is the sub-command of the supervisor's program that calls Check.
	Command = "container-hook"
	// Patience is how long a daemon that has just ended may take to come back.
	Patience = 2 * time.Second

	interval = 20 * time.Millisecond
	// Whoever writes more than this is not a container runtime.
	maxState = 1 << 20
	maxSpec  = 64 << 20
)

// state is the part that matters of what the runtime writes to a hook.
type state struct {
	ID     string `json:"id"`
	Bundle string `json:"bundle"`
}

// spec is the part that matters of a bundle's config.json.
type spec struct {
	Process *struct {
		Env []string `json:"env"`
	} `json:"process"`
}

// Check refuses a container that would not be limited. input is what the runtime
// writes to hooks; control is the path of the daemon's socket on the host.
func Check(ctx context.Context, input io.Reader, control, session string) error {
	env, err := environment(input)
	if err != nil {
		return fmt.Errorf("MPS session %s: %w", session, err)
	}
	if err := checkMarkers(env); err != nil {
		return err
	}
	if err := reach(ctx, control); err != nil {
		return fmt.Errorf("the MPS control daemon of session %s cannot be reached at %s, so this container would run without its limits: "+
			"see the log of the mps-supervisor on this node; the container starts once the session runs again: %w", session, control, err)
	}
	return nil
}

func environment(input io.Reader) ([]string, error) {
	var container state
	if err := json.NewDecoder(io.LimitReader(input, maxState)).Decode(&container); err != nil {
		return nil, fmt.Errorf("read the container's state from the runtime: %w", err)
	}
	if !filepath.IsAbs(container.Bundle) {
		return nil, fmt.Errorf("the container runtime gives the bundle %q: want an absolute path", container.Bundle)
	}
	file, err := os.Open(filepath.Join(container.Bundle, "config.json"))
	if err != nil {
		return nil, fmt.Errorf("read the container's configuration: %w", err)
	}
	defer func() { _ = file.Close() }()
	var config spec
	if err := json.NewDecoder(io.LimitReader(file, maxSpec)).Decode(&config); err != nil {
		return nil, fmt.Errorf("read the container's configuration %s: %w", file.Name(), err)
	}
	if config.Process == nil {
		return nil, fmt.Errorf("the container's configuration %s has no process", file.Name())
	}
	return config.Process.Env, nil
}

// checkMarkers refuses more than one: the mounts of the second would hide those of
// the first, and with them its daemon and its limits.
func checkMarkers(env []string) error {
	var markers []string
	for _, variable := range env {
		if strings.HasPrefix(variable, MPSMarkerPrefix) && !slices.Contains(markers, variable) {
			markers = append(markers, variable)
		}
	}
	if len(markers) < 2 {
		return nil
	}
	var sessions []string
	for _, marker := range markers {
		_, session, _ := strings.Cut(marker, "=")
		sessions = append(sessions, session)
	}
	slices.Sort(sessions)
	return fmt.Errorf("this container has %d MPS shares, of %s: a process can be a client of one MPS share only: "+
		"give each container one, or ask for one share with the sum", len(markers), strings.Join(slices.Compact(sessions), ", "))
}

// reach connects to the socket and hangs up.
func reach(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	ticker := time.NewTicker(interval)
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
