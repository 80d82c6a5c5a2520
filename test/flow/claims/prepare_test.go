// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// prepared is a claim on one machine, and what must be true of it while it is
// prepared.
type prepared struct {
	machine string
	change  func(*machine.Machine)
	// devices are GPU number, profile and start; no profile is the whole GPU.
	devices []harness.Device
	// instances are "profile id @ start" of all live instances.
	instances []string
	// nodes are the device nodes that a container gets, apart from common ones.
	nodes []string
	// after is the first GPU's MIG mode in the end.
	after bool
}

// TestPrepare prepares a claim twice and undoes it twice, since the kubelet may
// repeat every call.
func TestPrepare(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]prepared{
		"whole GPU": {
			machine: "dgx-h100",
			devices: []harness.Device{{GPU: 2}},
			nodes:   []string{"/dev/nvidia2"},
		},
		"whole GPU without MIG": {
			machine: "l4x2",
			devices: []harness.Device{{GPU: 1}},
			nodes:   []string{"/dev/nvidia1"},
		},
		"partition turns MIG mode on": {
			machine:   "dgx-h100",
			devices:   []harness.Device{{GPU: 0, Profile: "1g.10gb", Start: 4}},
			instances: []string{"19@4"},
			nodes:     []string{"/dev/nvidia-caps/nvidia-cap102", "/dev/nvidia-caps/nvidia-cap103", "/dev/nvidia0"},
		},
		"whole GPU and partitions in one claim": {
			machine:   "dgx-h100",
			devices:   []harness.Device{{GPU: 3}, {GPU: 0, Profile: "3g.40gb", Start: 4}, {GPU: 0, Profile: "1g.10gb", Start: 0}},
			instances: []string{"19@0", "9@4"},
		},
		"Ampere with MIG mode off": {
			machine: "a100-80x2",
			devices: []harness.Device{{GPU: 0}, {GPU: 1}},
			nodes:   []string{"/dev/nvidia0", "/dev/nvidia1"},
		},
		"Ampere with MIG mode on": {
			machine: "a100-80x1", change: harness.TurnMIGOn,
			devices:   []harness.Device{{GPU: 0, Profile: "2g.20gb", Start: 2}},
			instances: []string{"14@2"},
			after:     true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.run(t)
		})
	}
}

func (test prepared) run(t *testing.T) {
	change := test.change
	if change == nil {
		change = func(*machine.Machine) {}
	}
	n := harness.NewNode(t, test.machine, change)
	p := n.Start(t)
	claim := n.AllocateNamed(n.DeviceNames(t, test.devices))

	ids := p.MustPrepare(t, claim)
	if diff := cmp.Diff(ids, p.MustPrepare(t, claim)); diff != "" {
		t.Errorf("the second prepare gives other CDI ids (-first +second):\n%s", diff)
	}
	if len(ids) != len(test.devices) {
		t.Errorf("%d devices have the CDI ids %v", len(test.devices), ids)
	}
	if diff := cmp.Diff(test.instances, n.Live(t)); diff != "" {
		t.Errorf("live instances (-want +got):\n%s", diff)
	}
	n.WantClaims(t, types.UID(claim.GetUid()))
	spec := n.Container(t, ids...)
	if test.nodes != nil {
		if diff := cmp.Diff(test.nodes, harness.DeviceNodes(spec)); diff != "" {
			t.Errorf("device nodes of a container (-want +got):\n%s", diff)
		}
	}
	if !slices.Contains(spec.Process.Env, "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("a container runtime with NVIDIA's hook would add all GPUs: %v", spec.Process.Env)
	}

	p.MustUnprepare(t, claim)
	p.MustUnprepare(t, claim)
	n.WantClean(t)
	if on := n.MIGMode(t)[0]; on != test.after {
		t.Errorf("MIG mode is on: %v, want %v", on, test.after)
	}
}

// TestMIGModeFollowsClaims checks that MIG mode is on from the first partition to the
// last.
func TestMIGModeFollowsClaims(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	one := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	two := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 1)}))
	whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	step := func(what string, want bool) {
		t.Helper()
		if diff := cmp.Diff([]bool{want, false}, n.MIGMode(t)); diff != "" {
			t.Errorf("MIG mode %s (-want +got):\n%s", what, diff)
		}
	}
	step("at first", false)
	p.MustPrepare(t, one)
	step("with one partition", true)
	p.MustPrepare(t, two)
	n.WantNoRoom(t, p, harness.Device{GPU: 0})
	p.MustUnprepare(t, one)
	step("with the other partition", true)
	p.MustUnprepare(t, two)
	step("without partitions", false)
	p.MustPrepare(t, whole)
	step("with the whole GPU", false)
	p.MustUnprepare(t, whole)
	n.WantClean(t)
}

// TestSeveralClaimsInOneCall prepares seven partitions of one GPU, a whole GPU and a
// claim that must fail, all at once.
func TestSeveralClaimsInOneCall(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	var claims []*drapb.Claim
	var uids []types.UID
	for start := range 7 {
		claims = append(claims, n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", start)})))
	}
	claims = append(claims, n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 1}})))
	for _, c := range claims {
		uids = append(uids, types.UID(c.GetUid()))
	}
	unknown := n.AllocateNamed([]string{"gpu-0000-00-00-0"})
	answers := p.Prepare(t, append(slices.Clone(claims), unknown)...)
	for i := range claims {
		if answers[i].GetError() != "" {
			t.Errorf("claim %d: %s", i, answers[i].GetError())
		}
	}
	if answers[len(claims)].GetError() == "" {
		t.Error("a device that does not exist was prepared")
	}
	n.WantClaims(t, uids...)
	if live := n.Live(t); len(live) != 7 {
		t.Errorf("live instances: %v", live)
	}
	p.MustUnprepare(t, append(claims, unknown)...)
	n.WantClean(t)
}

// TestUnprepareAfterRestart checks that another process can release a claim that is
// gone from the API server, with the journal alone.
func TestUnprepareAfterRestart(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*harness.Driver, testing.TB){
		"stopped": (*harness.Driver).Stop,
		"killed":  func(p *harness.Driver, _ testing.TB) { p.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			first := n.Start(t)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "2g.20gb", 2), {GPU: 1}}))
			ids := first.MustPrepare(t, claim)
			end(first, t)

			second := n.Start(t)
			if diff := cmp.Diff(ids, second.MustPrepare(t, claim)); diff != "" {
				t.Errorf("another process gives other CDI ids (-first +second):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"14@2"}, n.Live(t)); diff != "" {
				t.Errorf("live instances (-want +got):\n%s", diff)
			}
			second.MustUnprepare(t, claim)
			n.WantClean(t)
		})
	}
}

// TestRefused checks that the error about a claim that cannot be prepared names the
// claim, the device and the field, and that nothing is left behind.
func TestRefused(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	gpu := n.DeviceName(t, 0, "", 0)
	part := n.DeviceName(t, 0, "1g.10gb", 0)
	for name, test := range map[string]struct {
		devices []string
		config  harness.Config
		want    []string
	}{
		"unknown device": {[]string{"gpu-0000-ff-00-0"}, "", []string{"gpu-0000-ff-00-0"}},
		"unknown field": {
			[]string{gpu}, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharin":{}}`,
			[]string{"sharin"},
		},
		"wrong value": {
			[]string{gpu}, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"Sometimes"}}`,
			[]string{"sharing.strategy", "Sometimes"},
		},
		"wrong kind": {
			[]string{gpu}, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"Config"}`,
			[]string{"kind", "Config"},
		},
		"kind for other devices": {
			[]string{part}, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`,
			[]string{part, "GpuConfig"},
		},
		"the good device of two": {[]string{part, "gpu-0000-ff-00-0"}, "", []string{"gpu-0000-ff-00-0"}},
	} {
		t.Run(name, func(t *testing.T) {
			var configs []harness.Config
			if test.config != "" {
				configs = append(configs, test.config)
			}
			claim := n.AllocateNamed(test.devices, configs...)
			got := p.Prepare(t, claim)[0].GetError()
			for _, want := range append(test.want, "default/"+claim.GetName()) {
				if !strings.Contains(got, want) {
					t.Errorf("the error lacks %q: %s", want, got)
				}
			}
			// The kubelet unprepares what it could not prepare.
			p.MustUnprepare(t, claim)
			n.WantClean(t)
		})
	}
}

// TestOneSession checks that only the part of the driver that can deal with hanging
// calls has an NVML session. NVIDIA's library for CDI would start one of its own.
func TestOneSession(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	p.Ready(t)
	p.MustPrepare(t, n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}})))
	calls, err := n.State.Calls()
	if err != nil {
		t.Fatal(err)
	}
	if calls["nvmlInitWithFlags"] == 0 || calls["nvmlInit_v2"] != 0 {
		t.Errorf("sessions by this driver: %d, by others: %d", calls["nvmlInitWithFlags"], calls["nvmlInit_v2"])
	}
}
