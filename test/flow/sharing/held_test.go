// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// TestSlowDaemon: while what one session does takes its time, sessions of other GPUs start, serve and end. When it is done at
// last, that session goes on, too.
func TestSlowDaemon(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]struct {
		function string
		// during is the operation that waits for it.
		during harness.Operation
	}{
		"start of the daemon":  {mps.ControlStart, harness.Prepare},
		"start of the server":  {mps.ServerStart, harness.Prepare},
		"limits":               {state.MPS + "set_default_active_thread_percentage", harness.Prepare},
		"observe":              {state.MPS + "get_server_list", harness.Observe},
		"end of the daemon":    {state.MPS + "quit", harness.Unprepare},
		"release while slow":   {state.MPS + "get_server_status", harness.Observe},
		"clients of the other": {state.MPS + "get_client_list", harness.Observe},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewMPSDriver(t, "h100x2")
			c := n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}})
			if slow.during != harness.Prepare {
				p.MustPrepare(t, c)
			}
			gate := n.Inject(t, machine.Fault{Function: slow.function, GPU: 0, Hang: true, Effect: machine.Proceed})
			answer := make(chan error, 1)
			if slow.during == harness.Observe {
				answer <- nil
			} else {
				go func() {
					_, err := p.Call(t.Context(), slow.during, c, harness.KubeletTimeout)
					answer <- err
				}()
			}
			gate.UntilStruck(t, p)
			for range 2 {
				other := n.Allocate(t, []harness.Device{{GPU: 1, Kind: harness.MPS}})
				wantOutput(t, n, n.Container(t, p.MustPrepare(t, other)...), []string{"as a client"}, "info")
				p.MustUnprepare(t, other)
			}
			gate.Remove(t)
			t.Logf("the call that was held: %v", <-answer) // it may have been too slow
			recovers(t, n, p, c)
		})
	}
}

// recovers ends a claim on the first GPU, and checks that the next one works.
func recovers(t *testing.T, n *harness.Node, p *harness.Driver, c *drapb.Claim) {
	t.Helper()
	p.MustUnprepare(t, c)
	p.UntilTrue(t, "the end of the session", func() bool { return len(n.Sessions(t)) == 0 })
	next := n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}})
	wantOutput(t, n, n.Container(t, p.MustPrepare(t, next)...), []string{"as a client"}, "info")
	p.MustUnprepare(t, next)
	p.UntilClean(t, n)
}
