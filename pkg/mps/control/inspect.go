// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/mps"
)

// Server is what a daemon reports about one of its servers.
type Server struct {
	PID   int
	State State
	// Limits are only known of a server that is active.
	Limits  Limits
	Clients []int
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
	server, argument, queries := Server{PID: pid}, " "+strconv.Itoa(pid), limitQueries(pid, spec)
	commands := slices.Concat([]string{"get_server_list", "get_server_status" + argument}, queries, []string{"get_client_list" + argument})
	lines, err := c.run(ctx, commands...)
	if err != nil {
		return server, nil, err
	}
	listed, answers := leadingPIDs(lines)
	if !slices.Contains(listed, pid) || len(answers) == 0 {
		return server, listed, nil
	}
	if server.State = parseState(answers[0]); server.State != StateActive { // what it says of limits does not matter
		server.Clients, err = c.clients(ctx, pid)
		return server, listed, err
	}
	if answers = answers[1:]; len(answers) < len(queries) {
		return server, listed, fmt.Errorf("MPS command %q: want %d answers%s",
			strings.Join(queries, "; "), len(queries), printed(strings.Join(answers, "\n")))
	}
	server.Limits, err = parseLimits(answers[:len(queries)], spec)
	server.Clients, _ = leadingPIDs(answers[len(queries):])
	return server, listed, err
}
