// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// unchanged leaves a machine as the catalogue has it.
func unchanged(*machine.Machine) {}

// TestPrepare prepares a claim twice and undoes it twice, since the kubelet may
// repeat every call.
func TestPrepare(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		machine string
		change  func(*machine.Machine)
		devices []harness.Device
		// instances are "profile id @ start" of all live instances.
		instances []string
		// nodes are the device nodes that a container gets, apart from common ones.
		nodes []string
		// after is the first GPU's MIG mode in the end.
		after bool
	}{
		"whole GPU": {
			machine: "dgx-h100", change: unchanged, devices: []harness.Device{{GPU: 2}}, nodes: []string{"/dev/nvidia2"},
		},
		"whole GPU without MIG": {
			machine: "l4x2", change: unchanged, devices: []harness.Device{{GPU: 1}}, nodes: []string{"/dev/nvidia1"},
		},
		"partition turns MIG mode on": {
			machine: "dgx-h100", change: unchanged, devices: []harness.Device{harness.Partition(0, "1g.10gb", 4)}, instances: []string{"19@4"},
			nodes: []string{"/dev/nvidia-caps/nvidia-cap102", "/dev/nvidia-caps/nvidia-cap103", "/dev/nvidia0"},
		},
		// As newer NVIDIA drivers number them.
		"instances are numbered from the upper half on": {
			machine: "dgx-h100", change: func(m *machine.Machine) { m.GPUs[0].MIG.UpperHalfFirst() },
			devices: []harness.Device{harness.Partition(0, "3g.40gb", 4)}, instances: []string{"9@4"},
			nodes: []string{"/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13", "/dev/nvidia0"},
		},
		"whole GPU and partitions in one claim": {
			machine: "dgx-h100", change: unchanged, instances: []string{"19@0", "9@4"},
			devices: []harness.Device{{GPU: 3}, harness.Partition(0, "3g.40gb", 4), harness.Partition(0, "1g.10gb", 0)},
		},
		"Ampere with MIG mode off": {
			machine: "a100-80x2", change: unchanged, devices: []harness.Device{{GPU: 0}, {GPU: 1}}, nodes: []string{"/dev/nvidia0", "/dev/nvidia1"},
		},
		"Ampere with MIG mode on": {
			machine: "a100-80x1", change: harness.TurnMIGOn, devices: []harness.Device{harness.Partition(0, "2g.20gb", 2)},
			instances: []string{"14@2"}, after: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, test.machine, test.change)
			p := n.Start(t)
			claim := n.Allocate(t, test.devices)
			ids := p.MustPrepare(t, claim)
			if diff := cmp.Diff(ids, p.MustPrepare(t, claim)); diff != "" || len(ids) != len(test.devices) {
				t.Errorf("%d devices; the second prepare gives other CDI ids (-first +second):\n%s", len(test.devices), diff)
			}
			for i, d := range test.devices {
				n.WantDevice(t, claim, ids[i], d)
			}
			expect.Same(t, n.Live(t), test.instances, "live instances")
			n.WantClaims(t, types.UID(claim.GetUid()))
			spec := n.Container(t, ids...)
			if diff := cmp.Diff(test.nodes, harness.DeviceNodes(spec)); diff != "" && test.nodes != nil {
				t.Errorf("device nodes of a container (-want +got):\n%s", diff)
			}
			if !slices.Contains(spec.Process.Env, "NVIDIA_VISIBLE_DEVICES=void") {
				t.Errorf("a container runtime with NVIDIA's hook would add all GPUs: %v", spec.Process.Env)
			}
			p.MustUnprepare(t, claim)
			p.MustUnprepare(t, claim)
			n.WantClean(t)
			expect.Equal(t, n.MIGMode(t)[0], test.after, "MIG mode is on")
		})
	}
}

// TestOneSession checks that only the part of the driver that can deal with hanging
// calls has an NVML session. NVIDIA's library for CDI would start one of its own.
func TestOneSession(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2")
	p.NewClaim(t, n, harness.Device{GPU: 0})
	calls := must.Get(n.State.Calls())(t)
	if calls["nvmlInitWithFlags"] == 0 || calls["nvmlInit_v2"] != 0 {
		t.Errorf("sessions by this driver: %d, by others: %d", calls["nvmlInitWithFlags"], calls["nvmlInit_v2"])
	}
}

// TestReboot checks that claims that the kubelet prepares again get the same partitions in
// the same places, with the new device numbers, and that one which it releases instead is in
// the way of nobody who has its place since.
func TestReboot(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		machine string
		change  func(*machine.Machine)
		devices []harness.Device
		// gone is of a claim that is not prepared again, and taken what another one has since.
		gone, taken harness.Device
	}{
		"Hopper": {
			"h100x4", unchanged, []harness.Device{harness.Partition(0, "1g.10gb", 4), harness.Partition(0, "2g.20gb", 0), {GPU: 1}, harness.Partition(2, "3g.40gb", 4)},
			harness.Device{GPU: 3}, harness.Partition(3, "7g.80gb", 0),
		},
		"Ampere": {
			"a100-80x2", harness.TurnMIGOn, []harness.Device{harness.Partition(0, "1g.10gb", 4), harness.Partition(1, "2g.20gb", 2)},
			harness.Partition(1, "1g.10gb", 0), harness.Partition(1, "1g.10gb", 0),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, test.machine, test.change)
			p := n.Start(t)
			claims := make([]*drapb.Claim, len(test.devices))
			prepare := func() (nodes [][]harness.DeviceNode) {
				t.Helper()
				for i, d := range test.devices {
					if claims[i] == nil {
						claims[i] = n.Allocate(t, []harness.Device{d})
					}
					ids := p.MustPrepare(t, claims[i])
					n.WantPrepared(t, claims[i], ids, d)
					got := must.Get(n.SpecNodes(claims[i].GetUid(), ids[0]))(t)
					nodes = append(nodes, got)
				}
				return nodes
			}
			before := prepare()
			gone, _ := p.NewClaim(t, n, test.gone)
			p.Kill()
			n.Reboot(t)

			p = n.Run(t)
			for i, now := range prepare() {
				if slices.Equal(before[i], now) {
					t.Errorf("claim %d has the device numbers of before the reboot: %v", i, now)
				}
			}
			other, ids := p.NewClaim(t, n, test.taken)
			p.MustUnprepare(t, gone)
			n.WantPrepared(t, other, ids, test.taken)
			p.MustUnprepare(t, append(claims, other)...) //nolint:makezero // its length is that of the claims
			n.WantClean(t)
		})
	}
}

// TestOrphans checks that prepared claims are released that the API server no longer has,
// or has with another UID, and others are not.
func TestOrphans(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x3", harness.Eager...)
	deleted, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
	replaced, _ := p.NewClaim(t, n, harness.Device{GPU: 1})
	kept, _ := p.NewClaim(t, n, harness.Partition(2, "1g.10gb", 0))
	n.API.DeleteClaim(deleted.GetNamespace(), deleted.GetName())
	n.API.SetClaim(&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: replaced.GetNamespace(), Name: replaced.GetName()}})
	p.UntilTrue(t, "their release", func() bool {
		return errors.Join(n.CheckNoFiles(deleted.GetUid()), n.CheckNoFiles(replaced.GetUid())) == nil
	})
	n.WantClaims(t, types.UID(kept.GetUid()))
	n.WantInstances(t, 0)
	n.WantInstances(t, 2, harness.Place{Profile: "1g.10gb", Start: 0})
	p.UntilEvent(t, n, "OrphanedClaimReleased")
	// The kubelet may still ask for it.
	p.MustUnprepare(t, deleted, replaced, kept)
	n.WantClean(t)
}
