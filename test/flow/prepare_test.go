// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// prepared is a claim on one machine, and what must be true of it while it is
// prepared.
type prepared struct {
	machine string
	change  func(*machine.Machine)
	// devices are GPU number, profile and start; no profile is the whole GPU.
	devices []request
	// instances are "profile id @ start" of all live instances.
	instances []string
	// nodes are the device nodes that a container gets, apart from common ones.
	nodes []string
	// after tells whether the first GPU's MIG mode is on once all is undone.
	after bool
}

// request is a device that a claim gets: by the number of its GPU, with a profile
// and a start a partition of it, with a kind a share.
type request struct {
	gpu     int
	profile string
	start   int
	kind    kind
	// memory and percent are what is asked for of a share.
	memory  int64
	percent int
}

// kind is that of a share, and empty for a device that one claim has alone.
type kind string

const (
	asMPS       kind = "mps"
	asTimeSlice kind = "timeslice"
)

// mig is a partition.
func mig(gpu int, profile string, start int) request {
	return request{gpu: gpu, profile: profile, start: start}
}

// name is that of the published device.
func (r request) name(pciAddress string) string {
	name := deviceName(pciAddress, place{r.profile, r.start})
	if r.kind != "" {
		name += "-" + string(r.kind)
	}
	return name
}

// shared is a share of the device instead of the device.
func (r request) shared(k kind) request {
	r.kind = k
	return r
}

func migOn(m *machine.Machine) {
	for i := range m.GPUs {
		m.GPUs[i].MIG.Current, m.GPUs[i].MIG.Pending = true, true
	}
}

// TestPrepare prepares a claim twice and undoes it twice, since the kubelet may
// repeat every call.
func TestPrepare(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]prepared{
		"whole GPU": {
			machine: "dgx-h100",
			devices: []request{{gpu: 2}},
			nodes:   []string{"/dev/nvidia2"},
		},
		"whole GPU without MIG": {
			machine: "l4x2",
			devices: []request{{gpu: 1}},
			nodes:   []string{"/dev/nvidia1"},
		},
		"partition turns MIG mode on": {
			machine:   "dgx-h100",
			devices:   []request{{gpu: 0, profile: "1g.10gb", start: 4}},
			instances: []string{"19@4"},
			nodes:     []string{"/dev/nvidia-caps/nvidia-cap102", "/dev/nvidia-caps/nvidia-cap103", "/dev/nvidia0"},
		},
		"whole GPU and partitions in one claim": {
			machine:   "dgx-h100",
			devices:   []request{{gpu: 3}, {gpu: 0, profile: "3g.40gb", start: 4}, {gpu: 0, profile: "1g.10gb", start: 0}},
			instances: []string{"19@0", "9@4"},
		},
		"Ampere with MIG mode off": {
			machine: "a100-80x2",
			devices: []request{{gpu: 0}, {gpu: 1}},
			nodes:   []string{"/dev/nvidia0", "/dev/nvidia1"},
		},
		"Ampere with MIG mode on": {
			machine: "a100-80x1", change: migOn,
			devices:   []request{{gpu: 0, profile: "2g.20gb", start: 2}},
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
	n := newNode(t, test.machine, change)
	p := n.start(t)
	claim := n.allocate(n.names(t, test.devices))

	ids := p.mustPrepare(t, claim)
	if diff := cmp.Diff(ids, p.mustPrepare(t, claim)); diff != "" {
		t.Errorf("the second prepare gives other CDI ids (-first +second):\n%s", diff)
	}
	if len(ids) != len(test.devices) {
		t.Errorf("%d devices have the CDI ids %v", len(test.devices), ids)
	}
	if diff := cmp.Diff(test.instances, n.live(t)); diff != "" {
		t.Errorf("live instances (-want +got):\n%s", diff)
	}
	n.wantClaims(t, types.UID(claim.GetUid()))
	spec := n.container(t, ids...)
	if test.nodes != nil {
		if diff := cmp.Diff(test.nodes, deviceNodes(spec)); diff != "" {
			t.Errorf("device nodes of a container (-want +got):\n%s", diff)
		}
	}
	if !slices.Contains(spec.Process.Env, "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("a container runtime with NVIDIA's hook would add all GPUs: %v", spec.Process.Env)
	}

	p.mustUnprepare(t, claim)
	p.mustUnprepare(t, claim)
	n.wantClean(t)
	if on := n.migMode(t)[0]; on != test.after {
		t.Errorf("MIG mode is on: %v, want %v", on, test.after)
	}
}

func (n *node) names(t testing.TB, devices []request) []string {
	t.Helper()
	var names []string
	for _, d := range devices {
		names = append(names, d.name(n.address(t, d.gpu)))
	}
	return names
}

// live are all instances as "profile id @ start", sorted.
func (n *node) live(t testing.TB) []string {
	t.Helper()
	var live []string
	for _, i := range n.instances(t) {
		live = append(live, itoa(int(i.ProfileID))+"@"+itoa(i.Placement.Start))
	}
	slices.Sort(live)
	return live
}

// TestMIGModeFollowsClaims: it is on from the first partition to the last.
func TestMIGModeFollowsClaims(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t)
	one := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
	two := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 1)}))
	whole := n.allocate(n.names(t, []request{{gpu: 0}}))
	step := func(what string, want bool) {
		t.Helper()
		if diff := cmp.Diff([]bool{want, false}, n.migMode(t)); diff != "" {
			t.Errorf("MIG mode %s (-want +got):\n%s", what, diff)
		}
	}
	step("at first", false)
	p.mustPrepare(t, one)
	step("with one partition", true)
	p.mustPrepare(t, two)
	n.wantNoRoom(t, p, request{gpu: 0})
	p.mustUnprepare(t, one)
	step("with the other partition", true)
	p.mustUnprepare(t, two)
	step("without partitions", false)
	p.mustPrepare(t, whole)
	step("with the whole GPU", false)
	p.mustUnprepare(t, whole)
	n.wantClean(t)
}

// TestSeveralClaimsInOneCall: seven partitions of one GPU, a whole GPU and a
// claim that must fail, all at once.
func TestSeveralClaimsInOneCall(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t)
	var claims []*drapb.Claim
	var uids []types.UID
	for start := range 7 {
		claims = append(claims, n.allocate(n.names(t, []request{mig(0, "1g.10gb", start)})))
	}
	claims = append(claims, n.allocate(n.names(t, []request{{gpu: 1}})))
	for _, c := range claims {
		uids = append(uids, types.UID(c.GetUid()))
	}
	unknown := n.allocate([]string{"gpu-0000-00-00-0"})
	answers := p.prepare(t, append(slices.Clone(claims), unknown)...)
	for i := range claims {
		if answers[i].GetError() != "" {
			t.Errorf("claim %d: %s", i, answers[i].GetError())
		}
	}
	if answers[len(claims)].GetError() == "" {
		t.Error("a device that does not exist was prepared")
	}
	n.wantClaims(t, uids...)
	if live := n.live(t); len(live) != 7 {
		t.Errorf("live instances: %v", live)
	}
	p.mustUnprepare(t, append(claims, unknown)...)
	n.wantClean(t)
}

// TestUnprepareAfterRestart: the journal alone is enough, in another process,
// when the claim is gone from the API server.
func TestUnprepareAfterRestart(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*process, testing.TB){
		"stopped": (*process).stop,
		"killed":  func(p *process, _ testing.TB) { p.kill() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x2")
			first := n.start(t)
			claim := n.allocate(n.names(t, []request{mig(0, "2g.20gb", 2), {gpu: 1}}))
			ids := first.mustPrepare(t, claim)
			end(first, t)

			second := n.start(t)
			if diff := cmp.Diff(ids, second.mustPrepare(t, claim)); diff != "" {
				t.Errorf("another process gives other CDI ids (-first +second):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"14@2"}, n.live(t)); diff != "" {
				t.Errorf("live instances (-want +got):\n%s", diff)
			}
			second.mustUnprepare(t, claim)
			n.wantClean(t)
		})
	}
}

// TestRefused: what cannot be prepared is told with the claim, the device and
// the field, and leaves nothing behind.
func TestRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	p := n.start(t)
	gpu := n.device(t, 0, "", 0)
	part := n.device(t, 0, "1g.10gb", 0)
	for name, test := range map[string]struct {
		devices []string
		config  config
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
			var configs []config
			if test.config != "" {
				configs = append(configs, test.config)
			}
			claim := n.allocate(test.devices, configs...)
			got := p.prepare(t, claim)[0].GetError()
			for _, want := range append(test.want, "default/"+claim.GetName()) {
				if !strings.Contains(got, want) {
					t.Errorf("the error lacks %q: %s", want, got)
				}
			}
			// The kubelet unprepares what it could not prepare.
			p.mustUnprepare(t, claim)
			n.wantClean(t)
		})
	}
}

// TestOneSession: only one part of the driver talks to NVML, and knows what to do
// about calls that hang. NVIDIA's library for CDI would start a session of its own.
func TestOneSession(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t)
	p.ready(t)
	p.mustPrepare(t, n.allocate(n.names(t, []request{{gpu: 0}})))
	calls, err := n.state.Calls()
	if err != nil {
		t.Fatal(err)
	}
	if calls["nvmlInitWithFlags"] == 0 || calls["nvmlInit_v2"] != 0 {
		t.Errorf("sessions by this driver: %d, by others: %d", calls["nvmlInitWithFlags"], calls["nvmlInit_v2"])
	}
}
