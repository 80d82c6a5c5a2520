// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
)

// ErrCommand means that a command failed.
var ErrCommand = errors.New("MPS control command failed")

// Control sends lines of commands to the daemon of the pipe folder and writes what
// it answers. The error is ErrNoDaemon where there is no daemon. Like NVIDIA's
// program it does not take it for an error when the daemon does not like a command:
// what is written says so.
func Control(ctx context.Context, pipe string, lines io.Reader, out io.Writer) error {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, network, filepath.Join(pipe, privilegedSocket))
	if err != nil {
		return ErrNoDaemon
	}
	defer c.Close()
	encoder, decoder := json.NewEncoder(c), packets(c)
	var failed error
	scanner := bufio.NewScanner(lines)
	for scanner.Scan() {
		line := strings.TrimSpace(scanner.Text())
		if line == "" {
			continue
		}
		var r result
		if err := encoder.Encode(command{Line: line}); err != nil {
			return fmt.Errorf("%w: %s: %w", ErrCommand, line, err)
		}
		if err := decoder.Decode(&r); err != nil {
			return fmt.Errorf("%w: %s: the daemon is gone", ErrCommand, line)
		}
		if r.Text != "" {
			if _, err := fmt.Fprintln(out, r.Text); err != nil {
				return err
			}
		}
		if r.Failed {
			failed = ErrCommand
		}
	}
	return errors.Join(failed, scanner.Err())
}
