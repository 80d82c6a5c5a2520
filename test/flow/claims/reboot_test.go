// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"slices"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// rebooted is a claim with one device that was prepared before a reboot.
type rebooted struct {
	gpu   int
	at    harness.Place
	claim *drapb.Claim
	ids   []string
}

// TestReboot checks that claims that the kubelet prepares again get the same partitions in
// the same places, with the new device numbers.
func TestReboot(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		machine string
		change  func(*machine.Machine)
		all     []rebooted
	}{
		"Hopper": {
			machine: "h100x3", change: func(*machine.Machine) {},
			all: []rebooted{
				{gpu: 0, at: harness.Place{Profile: "1g.10gb", Start: 4}}, {gpu: 0, at: harness.Place{Profile: "2g.20gb", Start: 0}},
				{gpu: 1}, {gpu: 2, at: harness.Place{Profile: "3g.40gb", Start: 4}},
			},
		},
		"Ampere": {
			machine: "a100-80x2", change: harness.TurnMIGOn,
			all: []rebooted{{gpu: 0, at: harness.Place{Profile: "1g.10gb", Start: 4}}, {gpu: 1, at: harness.Place{Profile: "2g.20gb", Start: 2}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, test.machine, test.change)
			p := n.Start(t)
			prepareAll(t, n, p, test.all)
			before := nodesOf(t, n, test.all)
			p.Kill()
			n.Reboot(t)

			p = n.Start(t)
			p.Ready(t)
			prepareAll(t, n, p, test.all)
			for i, now := range nodesOf(t, n, test.all) {
				if slices.Equal(before[i], now) {
					t.Errorf("claim %d has the device numbers of before the reboot: %v", i, now)
				}
			}
			for _, r := range test.all {
				p.MustUnprepare(t, r.claim)
			}
			n.WantClean(t)
		})
	}
}

// prepareAll prepares the claims, which are allocated the first time, and checks
// what they get against the machine as it is.
func prepareAll(t *testing.T, n *harness.Node, p *harness.Driver, all []rebooted) {
	t.Helper()
	for i := range all {
		r := &all[i]
		if r.claim == nil {
			r.claim = n.AllocateNamed([]string{harness.DeviceName(n.Address(t, r.gpu), r.at)})
		}
		r.ids = p.MustPrepare(t, r.claim)
	}
	for _, r := range all {
		if err := n.CheckPrepared(r.claim.GetUid(), r.ids, r.gpu, r.at); err != nil {
			t.Error(err)
		}
	}
}

func nodesOf(t *testing.T, n *harness.Node, all []rebooted) [][]harness.DeviceNode {
	t.Helper()
	var nodes [][]harness.DeviceNode
	for _, r := range all {
		got, err := n.SpecNodes(r.claim.GetUid(), r.ids[0])
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, got)
	}
	return nodes
}

// TestRebootAndNotPreparedAgain checks that a claim of before the reboot is in nobody's
// way, and that its release touches nothing.
func TestRebootAndNotPreparedAgain(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	old := []rebooted{{gpu: 0, at: harness.Place{Profile: "3g.40gb", Start: 4}}, {gpu: 1}, {gpu: 0, at: harness.Place{Profile: "1g.10gb", Start: 0}}}
	prepareAll(t, n, p, old)
	p.Kill()
	n.Reboot(t)

	p = n.Start(t)
	p.Ready(t)
	// Others get the same places, and more of the first.
	others := []rebooted{{gpu: 0, at: harness.Place{Profile: "3g.40gb", Start: 4}}, {gpu: 1, at: harness.Place{Profile: "7g.80gb", Start: 0}}}
	prepareAll(t, n, p, others)
	for _, r := range old {
		p.MustUnprepare(t, r.claim)
	}
	for _, r := range others {
		if err := n.CheckPrepared(r.claim.GetUid(), r.ids, r.gpu, r.at); err != nil {
			t.Errorf("after the release of a claim of before the reboot: %v", err)
		}
		p.MustUnprepare(t, r.claim)
	}
	n.WantClean(t)
}

// TestRebootInTheMiddle checks that a claim that was half prepared or half released when
// the machine went down leaves nothing.
func TestRebootInTheMiddle(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		function string
		in       harness.Operation
	}{
		"prepare":   {"nvmlDeviceCreateGpuInstanceWithPlacement", harness.Prepare},
		"unprepare": {"nvmlComputeInstanceDestroy", harness.Unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			p := n.Start(t)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			if test.in == harness.Unprepare {
				p.MustPrepare(t, claim)
			}
			fault := n.Inject(t, machine.Fault{Function: test.function, GPU: 0, Effect: machine.KillAfter})
			if _, err := p.Call(t.Context(), test.in, claim, harness.KubeletTimeout); err == nil {
				t.Fatal("the driver answered although it was killed")
			}
			fault.Remove(t)
			p.Kill()
			n.Reboot(t)
			p = n.Start(t)
			p.Ready(t)
			if test.in == harness.Prepare {
				ids := p.MustPrepare(t, claim)
				if err := n.CheckPrepared(claim.GetUid(), ids, 0, harness.Place{Profile: "1g.10gb", Start: 4}); err != nil {
					t.Error(err)
				}
			}
			p.MustUnprepare(t, claim)
			p.UntilClean(t, n)
		})
	}
}
