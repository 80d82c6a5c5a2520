// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

const (
	normal      = "runs: as a client of an MPS server"
	belowNormal = "runs: as a client of an MPS server, with priority 1 [BELOW NORMAL]"
)

// runs fails unless a program with these variables says so how it runs.
func (n *node) runs(want string, env ...string) {
	n.t.Helper()
	out, exit := n.run(n.clientCommand(as{env: env}, "info"))
	if exit != 0 || !strings.HasSuffix(strings.TrimSpace(out), want) {
		n.t.Errorf("with %q: exit code %d, %s, want %q", env, exit, out, want)
	}
}

// The daemon's priority is that of clients which come later, to servers that are there, too. A
// program can set its own, in either direction.
func TestClientPriority(t *testing.T) {
	n := newNode(t, "dgx-h100", nil)
	n.env = []string{n.visible(0)}
	n.daemon()
	server := n.server()
	n.tell("get_default_client_priority", "0")
	n.runs(normal)
	n.runs(belowNormal, PriorityVariable+"=1")

	n.tell("set_default_client_priority 1", "")
	n.tell("get_default_client_priority", "1")
	n.runs(belowNormal)
	n.runs(normal, PriorityVariable+"=0")
	n.runs(belowNormal, PriorityVariable+"=high")
	n.tell("get_server_list", server)

	n.tell("set_default_client_priority 2", `"2" is not a client priority: 0 [NORMAL] or 1 [BELOW NORMAL]`)
	n.tell("get_default_client_priority", "1")
	n.tell("quit", "")
	n.daemon() // the value has died with the daemon
	n.tell("get_default_client_priority", "0")
}

// The daemon's own environment gives the first value.
func TestClientPriorityFromTheEnvironment(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0), PriorityVariable+"=1")
	n.tell("get_default_client_priority", "1")
	n.runs(belowNormal)
}

// A driver without the commands has nothing of it.
func TestNoClientPriority(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.change(func(m *machine.Machine) { m.MPS.NoPriorities = true })
	n.daemon(n.visible(0), PriorityVariable+"=1")
	for _, command := range []string{"get_default_client_priority", "set_default_client_priority"} {
		n.tell(command+" 1", "Unknown command: "+command)
	}
	n.runs(normal, PriorityVariable+"=1")
}
