// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"flag"
	"maps"
	"slices"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

var crashAll = flag.Bool("crash.all", false, "go on in every way after each crash, not in one way after the other")

// crashLayout is a set of claims that the driver is killed over.
type crashLayout struct {
	machine string
	change  func(*machine.Machine)
	// beside are claims that are prepared before and must not notice.
	beside [][]request
	// claims are prepared and unprepared in one call, with this configuration.
	claims [][]request
	config config
	policy string
	// supervised: an MPS supervisor runs. limited: the driver has an interposer
	// library.
	supervised, limited bool
}

var crashLayouts = map[string]crashLayout{
	"whole": {
		machine: "h100x2", beside: [][]request{{mig(1, "1g.10gb", 0)}},
		claims: [][]request{{{gpu: 0}}},
	},
	"partition": {
		machine: "h100x1", beside: [][]request{{mig(0, "3g.40gb", 4)}},
		claims: [][]request{{mig(0, "1g.10gb", 0)}},
	},
	"partition turns MIG mode on": {
		machine: "h100x2", beside: [][]request{{{gpu: 1}}},
		claims: [][]request{{mig(0, "1g.10gb", 4)}},
	},
	"several GPUs": {
		machine: "h100x3", beside: [][]request{{mig(0, "1g.10gb", 6)}},
		claims: [][]request{{mig(0, "3g.40gb", 0), mig(1, "1g.10gb", 0), {gpu: 2}}},
	},
	"two claims on one GPU": {
		machine: "h100x2", beside: [][]request{{{gpu: 1}}},
		claims: [][]request{{mig(0, "1g.10gb", 0)}, {mig(0, "2g.20gb", 2)}},
	},
	"Ampere with MIG mode on": {
		machine: "a100-80x1", change: migOn, beside: [][]request{{mig(0, "1g.10gb", 6)}},
		claims: [][]request{{mig(0, "2g.20gb", 2)}},
	},
}

// crashSharing are the layouts with sharing.
var crashSharing = map[string]crashLayout{
	"first MPS share": {
		machine: "h100x2", supervised: true, beside: [][]request{{{gpu: 1, kind: asMPS, percent: 30}}},
		claims: [][]request{{{gpu: 0, kind: asMPS, memory: 10 << 30, percent: 25}}},
	},
	"second MPS share": {
		machine: "h100x1", supervised: true, beside: [][]request{{{kind: asMPS, memory: 10 << 30, percent: 25}}},
		claims: [][]request{{{kind: asMPS, memory: 20 << 30, percent: 50}}},
	},
	"MPS share of a partition": {
		machine: "h100x1", supervised: true, policy: partitionShares, beside: [][]request{{mig(0, "3g.40gb", 4).shared(asMPS)}},
		claims: [][]request{{mig(0, "1g.10gb", 0).shared(asMPS)}},
	},
	"MPS on two GPUs": {
		machine: "h100x3", supervised: true, beside: [][]request{{{gpu: 1, kind: asMPS}}},
		claims: [][]request{{{gpu: 0}, {gpu: 2}}}, config: gpuMPS,
	},
	"MPS on a partition": {
		machine: "h100x1", supervised: true, beside: [][]request{{mig(0, "1g.10gb", 6)}},
		claims: [][]request{{mig(0, "2g.20gb", 0)}}, config: migMPS,
	},
	"interval": {
		machine: "h100x2", beside: [][]request{{{gpu: 1, kind: asTimeSlice}}},
		claims: [][]request{{{gpu: 0}}}, config: gpuShort,
	},
	"software limits": {
		machine: "l4x1", limited: true, beside: [][]request{{{kind: asTimeSlice, memory: 4 << 30, percent: 50}}},
		claims: [][]request{{{kind: asTimeSlice, memory: 6 << 30, percent: 25}}},
	},
}

// Configurations of claims that own their devices.
const (
	gpuMPS config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{` +
		`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"8Gi"}}}`
	migMPS config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{` +
		`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"4Gi"}}}`
	gpuShort config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing",` +
		`"timeSlicingConfig":{"interval":"Short"}}}`
)

// crashOperation is what is interrupted. It returns when the driver has answered
// or is dead.
type crashOperation struct {
	prepared bool // the claims are prepared before
	call     func(ctx context.Context, p *process, claims []*drapb.Claim) error
}

var crashOperations = map[string]crashOperation{
	"prepare": {false, func(ctx context.Context, p *process, claims []*drapb.Claim) error {
		response, err := p.kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
		for _, c := range response.GetClaims() {
			err = errors.Join(err, asError(c.GetError()))
		}
		return err
	}},
	"unprepare": {true, func(ctx context.Context, p *process, claims []*drapb.Claim) error {
		response, err := p.kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claims})
		for _, c := range response.GetClaims() {
			err = errors.Join(err, asError(c.GetError()))
		}
		return err
	}},
}

func asError(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}

// crashScene is a node with the claims of a layout.
type crashScene struct {
	t         *testing.T
	n         *node
	layout    crashLayout
	operation crashOperation
	// supervisor is nil where the layout needs none.
	supervisor *supervisor
	beside     []*drapb.Claim
	// users are programs that use the claims beside, where these share.
	users []*user
	// claims are made anew for every case.
	claims []*drapb.Claim
	// pristine are the traces without any claim, without those while the claims
	// beside are prepared.
	pristine, without traces
}

// TestCrash kills the driver before every effect of preparing and unpreparing,
// and after the last, and goes on with another process.
//
// The kernel finds the effects, see package killpoint: system calls that change
// files, and the end of each change of the simulated GPUs. What is there after
// an effect is what is there before the next.
func TestCrash(t *testing.T) {
	t.Parallel()
	count := enumerate(t, "crashes", 700)
	layouts := maps.Clone(crashLayouts)
	maps.Copy(layouts, crashSharing)
	for layoutName, layout := range layouts {
		for operationName, operation := range crashOperations {
			t.Run(layoutName+"/"+operationName, func(t *testing.T) {
				t.Parallel()
				newCrashScene(t, layout, operation).killEverywhere(t, operationName, count)
			})
		}
	}
}

func newCrashScene(t *testing.T, layout crashLayout, operation crashOperation) *crashScene {
	t.Helper()
	change := layout.change
	if change == nil {
		change = func(*machine.Machine) {}
	}
	s := &crashScene{t: t, n: newNode(t, layout.machine, change), layout: layout, operation: operation}
	if layout.supervised {
		s.supervisor = s.n.startSupervisor(t)
	}
	s.pristine = s.n.traces(t)
	for _, devices := range layout.beside {
		s.beside = append(s.beside, s.n.claim(t, devices))
	}
	p := s.start(t, quiet)
	s.prepareBeside(t, p)
	p.kill()
	return s
}

// start runs a driver until the test ends.
func (s *crashScene) start(t *testing.T, flags []string) *process {
	t.Helper()
	return s.n.start(t, s.flags(flags)...)
}

func (s *crashScene) flags(flags []string) []string {
	flags = slices.Clip(flags)
	if s.layout.limited {
		flags = append(flags, s.n.interposer(s.t))
	}
	if s.layout.policy != "" {
		flags = append(flags, s.n.policy(s.t, s.layout.policy))
	}
	return flags
}

// prepareBeside needs a driver that has nothing else to do.
func (s *crashScene) prepareBeside(t *testing.T, p *process) {
	t.Helper()
	for _, user := range s.users {
		user.end()
	}
	s.users = nil
	for i, c := range s.beside {
		ids := p.mustPrepare(t, c)
		if s.layout.beside[i][0].kind == asMPS {
			s.users = append(s.users, s.n.use(s.t, ids...))
		}
	}
	s.without = s.n.traces(t)
}

// killEverywhere kills before effect 1, 2 and so on until there is no such effect.
func (s *crashScene) killEverywhere(t *testing.T, operation string, count *enumeration) {
	effects := s.effects(t)
	for i, e := range effects {
		t.Logf("effect %d: %s", i+1, s.shorten(e))
	}
	for n, more := 1, true; more; n++ {
		more = n <= len(effects)
		for i, continuation := range crashContinuations {
			if !*crashAll && n%len(crashContinuations) != i {
				continue
			}
			passed := t.Run("before "+itoa(n)+"/"+continuation.name, func(t *testing.T) {
				done, killed := s.crash(t, n)
				if killed {
					// There may be more than there were the first time.
					more = true
					t.Logf("killed before effect %d: %s", n, s.shorten(done[n-1]))
				}
				continuation.run(t, s)
				s.besideWorks(t)
				count.add(operation + ", then " + continuation.name)
			})
			if !passed {
				return // what is left disturbs all others
			}
		}
	}
}

// effects are those of the whole operation.
func (s *crashScene) effects(t *testing.T) []killpoint.Effect {
	t.Helper()
	// The simulator takes its lock when it counts the first call of a function.
	s.crash(t, 0)
	crashContinuations[0].run(t, s)
	effects, _ := s.crash(t, 0)
	crashContinuations[0].run(t, s)
	return effects
}

// crash runs the operation with new claims and kills the driver before effect n,
// or after the last one.
func (s *crashScene) crash(t *testing.T, n int) (effects []killpoint.Effect, killed bool) {
	t.Helper()
	p := s.n.startSupervised(t, s.flags(quiet)...)
	s.allocate(t)
	s.settle(t, p.process)
	if s.operation.prepared {
		for _, c := range s.claims {
			p.mustPrepare(t, c)
		}
	}
	p.Arm(n)
	err := s.operation.call(t.Context(), p.process, s.claims)
	effects, killed = p.Disarm()
	if !killed && err != nil {
		t.Fatal(err)
	}
	p.kill()
	return effects, killed
}

// allocate makes the claims anew.
func (s *crashScene) allocate(t *testing.T) {
	t.Helper()
	s.claims = nil
	for _, devices := range s.layout.claims {
		var configs []config
		if s.layout.config != "" {
			configs = append(configs, s.layout.config)
		}
		s.claims = append(s.claims, s.n.claim(t, devices, configs...))
	}
}

func (s *crashScene) shorten(e killpoint.Effect) string {
	text := e.String()
	for path, name := range map[string]string{s.n.root: "root", s.n.cdi: "cdi", s.n.plugins + "/" + driverName: "data", s.n.mps: "mps"} {
		text = strings.ReplaceAll(text, path, name)
	}
	for i, c := range s.claims {
		text = strings.ReplaceAll(text, c.GetUid(), "claim"+itoa(i))
	}
	return text
}
