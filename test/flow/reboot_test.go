// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// reboot ends the driver and the machine: instances and CDI files are gone, and
// all device numbers are others.
func (n *node) reboot(t *testing.T, p *process) {
	t.Helper()
	p.kill()
	if err := sysroot.Reboot(n.root, sysroot.RebootOptions{Renumber: true}); err != nil {
		t.Fatal(err)
	}
	for _, name := range n.cdiSpecs(t) {
		// The folder is in memory.
		if err := os.Remove(filepath.Join(n.cdi, name)); err != nil {
			t.Fatal(err)
		}
	}
}

// rebooted is a claim with one device that is there before a reboot.
type rebooted struct {
	gpu   int
	at    place
	claim *drapb.Claim
	ids   []string
}

// TestReboot: claims that the kubelet prepares again get the same partitions in
// the same places, with the device numbers of today.
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
				{gpu: 0, at: place{"1g.10gb", 4}}, {gpu: 0, at: place{"2g.20gb", 0}},
				{gpu: 1}, {gpu: 2, at: place{"3g.40gb", 4}},
			},
		},
		"Ampere": {
			machine: "a100-80x2", change: migOn,
			all: []rebooted{{gpu: 0, at: place{"1g.10gb", 4}}, {gpu: 1, at: place{"2g.20gb", 2}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, test.machine, test.change)
			p := n.start(t)
			prepareAll(t, n, p, test.all)
			before := nodesOf(t, n, test.all)
			n.reboot(t, p)

			p = n.start(t)
			p.ready(t)
			prepareAll(t, n, p, test.all)
			for i, now := range nodesOf(t, n, test.all) {
				if slices.Equal(before[i], now) {
					t.Errorf("claim %d has the device numbers of before the reboot: %v", i, now)
				}
			}
			for _, r := range test.all {
				p.mustUnprepare(t, r.claim)
			}
			n.wantClean(t)
		})
	}
}

// prepareAll prepares the claims, which are allocated the first time, and checks
// what they get against the machine as it is.
func prepareAll(t *testing.T, n *node, p *process, all []rebooted) {
	t.Helper()
	for i := range all {
		r := &all[i]
		if r.claim == nil {
			r.claim = n.allocate([]string{deviceName(n.address(t, r.gpu), r.at)})
		}
		r.ids = p.mustPrepare(t, r.claim)
	}
	for _, r := range all {
		if err := n.checkPrepared(r.claim.GetUid(), r.ids, r.gpu, r.at); err != nil {
			t.Error(err)
		}
	}
}

func nodesOf(t *testing.T, n *node, all []rebooted) [][]deviceNode {
	t.Helper()
	var nodes [][]deviceNode
	for _, r := range all {
		got, err := n.specNodes(r.claim.GetUid(), r.ids[0])
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, got)
	}
	return nodes
}

// TestRebootAndNotPreparedAgain: what a claim had before the reboot does not
// exist, so its release touches nothing and it is in nobody's way.
func TestRebootAndNotPreparedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t)
	old := []rebooted{{gpu: 0, at: place{"3g.40gb", 4}}, {gpu: 1}, {gpu: 0, at: place{"1g.10gb", 0}}}
	prepareAll(t, n, p, old)
	n.reboot(t, p)

	p = n.start(t)
	p.ready(t)
	// Others get the same places, and more of the first.
	others := []rebooted{{gpu: 0, at: place{"3g.40gb", 4}}, {gpu: 1, at: place{"7g.80gb", 0}}}
	prepareAll(t, n, p, others)
	for _, r := range old {
		p.mustUnprepare(t, r.claim)
	}
	for _, r := range others {
		if err := n.checkPrepared(r.claim.GetUid(), r.ids, r.gpu, r.at); err != nil {
			t.Errorf("after the release of a claim of before the reboot: %v", err)
		}
		p.mustUnprepare(t, r.claim)
	}
	n.wantClean(t)
}

// TestRebootInTheMiddle: a claim that was half prepared or half unprepared when
// the machine went down leaves nothing.
func TestRebootInTheMiddle(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		function string
		in       operation
	}{
		"prepare":   {"nvmlDeviceCreateGpuInstanceWithPlacement", prepare},
		"unprepare": {"nvmlComputeInstanceDestroy", unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x2")
			p := n.start(t)
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			if test.in == unprepare {
				p.mustPrepare(t, claim)
			}
			fault := n.inject(t, machine.Fault{Function: test.function, GPU: 0, Effect: machine.KillAfter})
			if _, err := p.try(t.Context(), test.in, claim, kubeletTime); err == nil {
				t.Fatal("the driver answered although it was killed")
			}
			fault.remove(t)
			n.reboot(t, p)
			p = n.start(t)
			p.ready(t)
			if test.in == prepare {
				ids := p.mustPrepare(t, claim)
				if err := n.checkPrepared(claim.GetUid(), ids, 0, place{"1g.10gb", 4}); err != nil {
					t.Error(err)
				}
			}
			p.mustUnprepare(t, claim)
			p.untilClean(t, n)
		})
	}
}
