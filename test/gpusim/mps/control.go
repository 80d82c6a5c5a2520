// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/state"
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
	speaker := speaker{json.NewEncoder(c), packets(c)}
	var failed error
	scanner := bufio.NewScanner(lines)
	for scanner.Scan() {
		line := strings.TrimSpace(scanner.Text())
		if line == "" {
			continue
		}
		r, err := speaker.say(line)
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrCommand, line, err)
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

// speaker is who has commands.
type speaker struct {
	encoder *json.Encoder
	decoder *json.Decoder
}

var errGone = errors.New("the daemon is gone")

// say sends one line, and again with what the file says that the daemon asks for.
func (s speaker) say(line string) (result, error) {
	next := command{Line: line}
	for {
		var r result
		if err := s.encoder.Encode(next); err != nil {
			return r, err
		}
		if s.decoder.Decode(&r) != nil {
			return r, errGone
		}
		if r.Shared == "" {
			return r, nil
		}
		token, err := os.ReadFile(filepath.Join(SharedMemory, r.Shared))
		if err != nil || next.Token != "" {
			//nolint:nilerr // the daemon answers so to clients without its shared memory
			return result{Text: "Failed to open the control daemon's shared memory", Failed: true}, nil
		}
		next.Token = string(token)
	}
}

// CommandElsewhere is counted among the calls of the machine (state.File.Calls) when somebody had a command and not the
// daemon's /dev/shm, where that is needed.
const CommandElsewhere = state.MPS + "command_elsewhere"

// proof is a file in the daemon's /dev/shm that somebody has to read before his commands are taken.
type proof struct {
	name, token  string
	asked, given bool
}

// proof returns what a new connection has to prove, which is nothing on most machines.
func (d *Daemon) proof() (*proof, error) {
	m, err := d.state.Snapshot()
	if err != nil || !m.MPS.ControlNeedsSharedMemory {
		return &proof{given: true}, err
	}
	p := &proof{token: rand.Text()}
	p.name = fmt.Sprintf("mps.control.%d.%s", os.Getpid(), p.token[:8])
	return p, os.WriteFile(filepath.Join(SharedMemory, p.name), []byte(p.token), 0o600)
}

// accept returns the name of the file whose token is still to be given, or "". Once it is given there is no file any more.
func (p *proof) accept(token string) string {
	if !p.given && token == p.token {
		p.given = true
		p.close()
	}
	p.asked = true
	return p.name
}

func (p *proof) close() {
	if p.name != "" {
		_ = os.Remove(filepath.Join(SharedMemory, p.name))
		p.name = ""
	}
}

// hangUp ends a connection. It may have been for no command.
func (d *Daemon) hangUp(p *proof) {
	p.close()
	if p.asked && !p.given {
		_, _ = d.state.Strike(CommandElsewhere)
	}
}
