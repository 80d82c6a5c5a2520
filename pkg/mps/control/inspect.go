// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/partage-dev/partage/pkg/mps"
)

// Server is what a daemon reports about one of its servers.
type Server struct {
	PID   int
	State State
	// Unlimited says which limit of the spec a server does not have that is active.
	Unlimited string
	Clients   []int
}

// Inspect queries all servers of the daemon. expected are the servers that the caller knows: if it is right about a single
// one, one run of NVIDIA's program is enough.
func (c Client) Inspect(ctx context.Context, expected []int, spec mps.Spec) ([]Server, error) {
	if len(expected) == 1 {
		server, listed, err := c.inspect(ctx, expected[0], spec)
		if err != nil || slices.Equal(listed, expected) {
			return []Server{server}, err
		}
	}
	listed, err := c.servers(ctx)
	if err != nil {
		return nil, err
	}
	servers := make([]Server, len(listed))
	for i, pid := range listed {
		if servers[i], _, err = c.inspect(ctx, pid, spec); err != nil {
			return nil, err
		}
	}
	return servers, nil
}

// inspect queries one server, and which ones there are. Nothing more is known of one that is not among them.
func (c Client) inspect(ctx context.Context, pid int, spec mps.Spec) (_ Server, listed []int, err error) {
	server, argument, limits := Server{PID: pid}, " "+strconv.Itoa(pid), limitsOf(pid, spec)
	commands := append([]string{"get_server_list", "get_server_status" + argument, "get_client_list" + argument}, queries(limits)...)
	lines, err := c.run(ctx, commands...)
	if err != nil {
		return server, nil, err
	}
	listed, answers := leadingPIDs(lines)
	if !slices.Contains(listed, pid) {
		return server, listed, nil
	}
	if server, err = parseServer(server, answers, limits); err != nil {
		err = fmt.Errorf("MPS command %q: %w%s", strings.Join(commands, "; "), err, printed(strings.Join(lines, "\n")))
	}
	return server, listed, err
}

// parseServer reads a state, PIDs of clients, and as many limits.
func parseServer(server Server, answers []string, limits []limit) (_ Server, err error) {
	if len(answers) == 0 || !unicode.IsLetter(rune(answers[0][0])) {
		return server, errors.New("want the state of the server")
	}
	server.State, answers = parseState(answers[0]), answers[1:]
	if server.State != StateActive { // what it says of limits does not matter
		server.Clients, _ = leadingPIDs(answers)
		return server, nil
	}
	if len(answers) < len(limits) {
		return server, fmt.Errorf("want %d limits", len(limits))
	}
	clients := answers[:len(answers)-len(limits)]
	var rest []string
	if server.Clients, rest = leadingPIDs(clients); len(rest) > 0 {
		return server, fmt.Errorf("want PIDs of clients and %d limits", len(limits))
	}
	server.Unlimited, err = compare(limits, answers[len(clients):])
	return server, err
}
