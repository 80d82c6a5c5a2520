// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"slices"
	"strconv"

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

// Inspect queries all servers of the daemon. expected are the servers that the
// caller knows; if it is right about a single one, one run of NVIDIA's program is
// enough.
func (c Client) Inspect(ctx context.Context, expected []int, spec mps.Spec) ([]Server, error) {
	pids := expected
	var err error
	if len(pids) != 1 {
		if pids, err = c.Servers(ctx); err != nil {
			return nil, err
		}
	}
	if len(pids) == 1 {
		server, ok, err := c.inspectOnly(ctx, pids[0], spec)
		if err != nil {
			return nil, err
		}
		if ok {
			return []Server{server}, nil
		}
		if pids, err = c.Servers(ctx); err != nil {
			return nil, err
		}
	}
	var servers []Server
	for _, pid := range pids {
		server, err := c.inspect(ctx, pid, spec)
		if err != nil {
			return nil, err
		}
		servers = append(servers, server)
	}
	return servers, nil
}

// inspectOnly queries the server that is thought to be the only one, with one run
// of NVIDIA's program, since this is done often. It returns false if the answers
// are not as expected: the server has ended, there are others, or the driver is an
// older one. The caller then queries one by one.
func (c Client) inspectOnly(ctx context.Context, pid int, spec mps.Spec) (server Server, ok bool, err error) {
	argument, queries := " "+strconv.Itoa(pid), limitQueries(pid, spec)
	commands := slices.Concat([]string{"get_server_list", "get_server_status" + argument}, queries, []string{"get_client_list" + argument})
	lines, err := c.run(ctx, commands...)
	if err != nil {
		return Server{}, false, err
	}
	pids, rest := leadingPIDs(lines)
	if !slices.Equal(pids, []int{pid}) || len(rest) == 0 {
		return Server{}, false, nil
	}
	server = Server{PID: pid, State: parseState(rest[0])}
	if server.State != StateActive { // what it says of limits does not matter
		server.Clients, err = c.Clients(ctx, pid)
		return server, err == nil, err
	}
	if len(rest) < 1+len(queries) {
		return Server{}, false, nil
	}
	if server.Limits, err = parseLimits(rest[1:1+len(queries)], spec); err != nil {
		return Server{}, false, nil //nolint:nilerr // queried again, one by one
	}
	server.Clients, rest = leadingPIDs(rest[1+len(queries):])
	return server, len(rest) == 0, nil
}

func (c Client) inspect(ctx context.Context, pid int, spec mps.Spec) (Server, error) {
	server := Server{PID: pid}
	var err error
	if server.State, err = c.State(ctx, pid); err != nil {
		return Server{}, err
	}
	if server.State == StateActive {
		if server.Limits, err = c.Limits(ctx, pid, spec); err != nil {
			return Server{}, err
		}
	}
	server.Clients, err = c.Clients(ctx, pid)
	return server, err
}
