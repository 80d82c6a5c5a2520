// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
)

// observation is one of a session.
type observation struct {
	rules.Observation
	session *session
}

// observe reads all that the rules need to know. An error means that nothing can be decided now.
func (s *session) observe(ctx context.Context, goal rules.Goal, wanted *mps.Spec) (*observation, error) {
	o := &observation{session: s, Observation: rules.Observation{
		Now: time.Now(), Goal: goal, Times: s.options.times(), Wanted: s.record.Spec, Record: s.record, Pace: s.pace, Before: s.current().Clients,
	}}
	if wanted != nil {
		o.Wanted, o.Calling = *wanted, true
	}
	if o.Goal != rules.Running {
		return o, nil
	}
	if err := s.daemon.adopt(ctx); err != nil {
		return nil, err
	}
	if !o.isKept() {
		return o, nil
	}
	var err error
	if o.Unmounted, err = s.folder.lost(); len(o.Unmounted) > 0 || err != nil {
		return o, err
	}
	listed, err := o.inspect(ctx)
	switch {
	case err == nil && len(s.record.Sockets) == 0: // nobody has been asked yet
	case err == nil:
		o.observeServers(listed)
	case !o.isKept():
	case ctx.Err() != nil:
		return nil, fmt.Errorf("the control daemon does not answer: %w: %w", context.Cause(ctx), err)
	case errors.Is(err, errSockets):
		o.Replaced = err.Error()
	default:
		o.Silent = err.Error()
		o.Harmed = len(credible(o.Before, s.record.Servers))
	}
	return o, nil
}

// isKept notes whether the daemon runs.
func (o *observation) isKept() bool {
	kept := o.session.daemon.keeper
	if o.Keeps = !kept.Ended(); !o.Keeps && kept != nil {
		o.Ended = keeper.How(kept)
	}
	return o.Keeps
}

// inspect asks the daemon for its servers, once it is known to listen on its sockets.
func (o *observation) inspect(ctx context.Context) (_ []control.Server, err error) {
	s := o.session
	if len(s.record.Sockets) == 0 {
		o.Daemon, o.Sockets, err = s.daemon.listening(ctx)
		return nil, err
	}
	client, err := s.daemon.client(&s.record)
	if err != nil {
		return nil, err
	}
	alive, cancel := s.daemon.keeper.Context(ctx, "the control daemon")
	defer cancel()
	return client.Inspect(alive, process.PIDs(s.record.Servers), s.record.Spec)
}

// observeServers is about a daemon that has answered.
func (o *observation) observeServers(listed []control.Server) {
	s := o.session
	o.Clients = []int{}
	for i := range listed {
		server := o.server(&listed[i])
		o.Servers = append(o.Servers, server)
		o.Clients = append(o.Clients, listed[i].Clients...)
		for _, pid := range listed[i].Clients {
			if s.pods.isDoomed(pid, o.Now) && s.watch.terminable(pid, o.Now, s.options.CheckInterval/2) != nil {
				o.Doomed = append(o.Doomed, rules.Client{Server: server.ID.PID, PID: pid})
			}
		}
	}
	if slices.ContainsFunc(o.Servers, func(server rules.Server) bool { return !server.Alive }) {
		o.Clients = o.Before // whom it had: the daemon may have forgotten them first
	}
	for _, id := range s.record.Servers {
		if !slices.ContainsFunc(o.Servers, func(server rules.Server) bool { return server.ID == id }) {
			o.Gone = append(o.Gone, id)
		}
	}
	if len(listed) == 0 && s.record.Daemon != nil {
		children, err := process.Children(s.record.Daemon.PID)
		o.Childless = err == nil && len(children) == 0
	}
	if o.Killed = s.watch.killed(); o.Killed != "" || s.record.ClientKilled != "" {
		o.Harmed = s.watch.harmed(o.Clients)
	}
	s.watch.see(o.Clients, s.record.Servers)
}

// server is what is known of a process that the daemon calls its server.
func (o *observation) server(listed *control.Server) rules.Server {
	s := o.session
	id, err := process.Identify(listed.PID)
	if err != nil {
		id = process.ID{PID: listed.PID}
		if i := slices.IndexFunc(s.record.Servers, func(known process.ID) bool { return known.PID == id.PID }); i >= 0 {
			id = s.record.Servers[i]
		}
	}
	server := rules.Server{
		ID: id, Alive: id.Alive(), Own: true, State: listed.State, Unlimited: listed.Unlimited, User: s.record.ServerUser,
	}
	if !slices.Contains(s.record.Servers, id) {
		server.Own, server.User = id.DescendsFrom(s.daemon.keeper.ID), ""
	}
	if server.User == "" {
		server.User = process.User(id.PID)
	}
	return server
}
