// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import "context"

// server is one as a check saw it.
type server struct {
	pid     int
	state   state
	limits  limits
	clients []int
}

func serverPIDs(servers []server) []int {
	pids := make([]int, len(servers))
	for i, one := range servers {
		pids[i] = one.pid
	}
	return pids
}

// inspect asks the daemon about its servers, which may be these.
func inspect(ctx context.Context, c control, known []int, spec Spec) ([]server, error) {
	var err error
	if len(known) != 1 {
		if known, err = c.servers(ctx); err != nil {
			return nil, err
		}
	}
	if len(known) == 1 {
		l, ok, err := c.look(ctx, known[0], spec)
		if err != nil {
			return nil, err
		}
		if ok && len(l.servers) == 1 {
			return []server{{pid: known[0], state: l.state, limits: l.limits, clients: l.clients}}, nil
		}
		if known, err = c.servers(ctx); err != nil {
			return nil, err
		}
	}
	var servers []server
	for _, pid := range known {
		one := server{pid: pid}
		if one.state, err = c.state(ctx, pid); err != nil {
			return nil, err
		}
		if one.state == stateActive {
			if one.limits, err = c.limits(ctx, pid, spec); err != nil {
				return nil, err
			}
		}
		if one.clients, err = c.clients(ctx, pid); err != nil {
			return nil, err
		}
		servers = append(servers, one)
	}
	return servers, nil
}
