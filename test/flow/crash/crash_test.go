// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"flag"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

var crashAll = flag.Bool("crash.all", false, "go on in every way after each crash, not in one way after the other")

// crashLayout is a set of claims that the driver is killed over.
type crashLayout struct {
	machine string
	change  func(*machine.Machine)
	// beside are claims that are prepared before and must not notice.
	beside [][]harness.Device
	// claims are prepared and unprepared in one call, with this configuration.
	claims [][]harness.Device
	config harness.Config
	policy string
	// supervised: an MPS supervisor runs. limited: the driver has an interposer
	// library. reported: it writes the status of claims and the files about devices.
	supervised, limited, reported bool
}

var crashLayouts = map[string]crashLayout{
	"whole": {
		machine: "h100x2", beside: [][]harness.Device{{harness.Partition(1, "1g.10gb", 0)}},
		claims: [][]harness.Device{{{GPU: 0}}},
	},
	"partition": {
		machine: "h100x1", beside: [][]harness.Device{{harness.Partition(0, "3g.40gb", 4)}},
		claims: [][]harness.Device{{harness.Partition(0, "1g.10gb", 0)}},
	},
	"partition turns MIG mode on": {
		machine: "h100x2", beside: [][]harness.Device{{{GPU: 1}}},
		claims: [][]harness.Device{{harness.Partition(0, "1g.10gb", 4)}},
	},
	"several GPUs": {
		machine: "h100x3", beside: [][]harness.Device{{harness.Partition(0, "1g.10gb", 6)}},
		claims: [][]harness.Device{{harness.Partition(0, "3g.40gb", 0), harness.Partition(1, "1g.10gb", 0), {GPU: 2}}},
	},
	"two claims on one GPU": {
		machine: "h100x2", beside: [][]harness.Device{{{GPU: 1}}},
		claims: [][]harness.Device{{harness.Partition(0, "1g.10gb", 0)}, {harness.Partition(0, "2g.20gb", 2)}},
	},
	"Ampere with MIG mode on": {
		machine: "a100-80x1", change: harness.TurnMIGOn, beside: [][]harness.Device{{harness.Partition(0, "1g.10gb", 6)}},
		claims: [][]harness.Device{{harness.Partition(0, "2g.20gb", 2)}},
	},
}

// crashSharing are the layouts with sharing.
var crashSharing = map[string]crashLayout{
	"first MPS share": {
		machine: "h100x2", supervised: true, beside: [][]harness.Device{{{GPU: 1, Kind: harness.MPS, Percent: 30}}},
		claims: [][]harness.Device{{{GPU: 0, Kind: harness.MPS, Memory: 10 << 30, Percent: 25}}},
	},
	"second MPS share": {
		machine: "h100x1", supervised: true, beside: [][]harness.Device{{{Kind: harness.MPS, Memory: 10 << 30, Percent: 25}}},
		claims: [][]harness.Device{{{Kind: harness.MPS, Memory: 20 << 30, Percent: 50}}},
	},
	"MPS share of a partition": {
		machine: "h100x1", supervised: true, policy: harness.PartitionSharesPolicy, beside: [][]harness.Device{{harness.Partition(0, "3g.40gb", 4).Shared(harness.MPS)}},
		claims: [][]harness.Device{{harness.Partition(0, "1g.10gb", 0).Shared(harness.MPS)}},
	},
	"MPS on two GPUs": {
		machine: "h100x3", supervised: true, beside: [][]harness.Device{{{GPU: 1, Kind: harness.MPS}}},
		claims: [][]harness.Device{{{GPU: 0}, {GPU: 2}}}, config: harness.GPUWithMPS,
	},
	"MPS on a partition": {
		machine: "h100x1", supervised: true, beside: [][]harness.Device{{harness.Partition(0, "1g.10gb", 6)}},
		claims: [][]harness.Device{{harness.Partition(0, "2g.20gb", 0)}}, config: harness.PartitionWithMPS,
	},
	"interval": {
		machine: "h100x2", beside: [][]harness.Device{{{GPU: 1, Kind: harness.TimeSlice}}},
		claims: [][]harness.Device{{{GPU: 0}}}, config: harness.GPUWithShortSlice,
	},
	"software limits": {
		machine: "l4x1", limited: true, beside: [][]harness.Device{{{Kind: harness.TimeSlice, Memory: 4 << 30, Percent: 50}}},
		claims: [][]harness.Device{{{Kind: harness.TimeSlice, Memory: 6 << 30, Percent: 25}}},
	},
}

// crashOperation is what a kill interrupts. It returns when the driver has answered or is
// dead.
type crashOperation struct {
	name     string
	prepared bool // the claims are prepared before
	call     func(ctx context.Context, p *harness.Driver, claims []*drapb.Claim) error
}

var crashOperations = []crashOperation{
	{"prepare", false, func(ctx context.Context, p *harness.Driver, claims []*drapb.Claim) error {
		response, err := p.Kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
		for _, c := range response.GetClaims() {
			err = errors.Join(err, harness.AsError(c.GetError()))
		}
		return err
	}},
	{"unprepare", true, func(ctx context.Context, p *harness.Driver, claims []*drapb.Claim) error {
		response, err := p.Kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claims})
		for _, c := range response.GetClaims() {
			err = errors.Join(err, harness.AsError(c.GetError()))
		}
		return err
	}},
}

// crashNode is a node with the claims of a layout.
type crashNode struct {
	t         *testing.T
	n         *harness.Node
	layout    crashLayout
	operation crashOperation
	// supervisor is nil where the layout needs none.
	supervisor *harness.Supervisor
	beside     []*drapb.Claim
	// users are programs that use the claims beside, where these share.
	users []*harness.Program
	// claims are made anew for every case.
	claims []*drapb.Claim
	// last is the driver that was started last, if any.
	last *harness.Driver
	// pristine is what is there without any claim, without what is there with the claims
	// beside only.
	pristine, without harness.Snapshot
}

// TestCrash kills the driver before every effect of preparing and unpreparing,
// and after the last, and goes on with another process.
//
// The kernel finds the effects, see package killpoint: system calls that change
// files, and the end of each change of the simulated GPUs. What is there after
// an effect is what is there before the next.
func TestCrash(t *testing.T) {
	t.Parallel()
	count := harness.Enumerate(t, "crashes", 700)
	layouts := maps.Clone(crashLayouts)
	maps.Copy(layouts, crashSharing)
	for name, layout := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newCrashNode(t, layout)
			for _, operation := range crashOperations {
				passed := t.Run(operation.name, func(t *testing.T) {
					s.operation = operation
					s.killEverywhere(t, count)
				})
				if !passed {
					return // what is left disturbs the other operation
				}
			}
		})
	}
}

func newCrashNode(t *testing.T, layout crashLayout) *crashNode {
	t.Helper()
	change := layout.change
	if change == nil {
		change = func(*machine.Machine) {}
	}
	s := &crashNode{t: t, n: harness.NewNode(t, layout.machine, change), layout: layout}
	if layout.supervised {
		s.supervisor = s.n.StartSupervisor(t)
	}
	s.pristine = s.n.Snapshot(t)
	for _, devices := range layout.beside {
		s.beside = append(s.beside, s.n.Allocate(t, devices))
	}
	p := s.start(t, harness.Quiet)
	s.prepareBeside(t, p)
	p.Kill()
	// The simulator takes its lock when it counts the first call of a function, which
	// would be an effect.
	s.operation = crashOperations[1]
	s.crash(t, 0)
	crashContinuations[0].run(t, s)
	return s
}

// start runs a driver until the test ends.
func (s *crashNode) start(t *testing.T, flags []string) *harness.Driver {
	t.Helper()
	s.last = s.n.Start(t, s.flags(flags)...)
	return s.last
}

func (s *crashNode) flags(flags []string) []string {
	flags = slices.Clip(flags)
	if s.layout.limited {
		flags = append(flags, s.n.Interposer(s.t))
	}
	if s.layout.reported {
		flags = append(flags, harness.ClaimStatusOn, harness.DeviceMetadataOn)
	}
	if s.layout.policy != "" {
		flags = append(flags, s.n.Policy(s.t, s.layout.policy))
	}
	return flags
}

// prepareBeside needs a driver that has nothing else to do.
func (s *crashNode) prepareBeside(t *testing.T, p *harness.Driver) {
	t.Helper()
	for _, user := range s.users {
		user.Kill()
	}
	s.users = nil
	for i, c := range s.beside {
		ids := p.MustPrepare(t, c)
		if s.layout.beside[i][0].Kind == harness.MPS {
			s.users = append(s.users, s.n.StartProgram(s.t, ids...))
		}
	}
	s.without = s.n.Snapshot(t)
}

// killEverywhere kills before effect 1, 2 and so on until there is no such effect.
func (s *crashNode) killEverywhere(t *testing.T, count *harness.Enumeration) {
	effects := s.effects(t)
	for i, e := range effects {
		t.Logf("effect %d: %s", i+1, s.shorten(e))
		// The disk may be busy for long, and nothing needs it; see docs/design/claims.md.
		if strings.HasSuffix(e.Call, "sync") && !s.layout.reported && !s.besideClaims(e) {
			t.Errorf("the claim waits for the disk: %s", s.shorten(e))
		}
	}
	for n, more := 1, true; more; n++ {
		more = n <= len(effects)
		if !count.Find(n) {
			continue
		}
		for i, continuation := range crashContinuations {
			if !*crashAll && harness.TheSample().Way(n, len(crashContinuations)) != i {
				continue
			}
			passed := t.Run("before "+strconv.Itoa(n)+"/"+continuation.name, func(t *testing.T) {
				done, killed := s.crash(t, n)
				if killed {
					// There may be more than there were the first time.
					more = true
					t.Logf("killed before effect %d: %s", n, s.shorten(done[n-1]))
				}
				continuation.run(t, s)
				s.besideWorks(t)
				count.Ran(s.operation.name + ", then " + continuation.name)
			})
			if !passed {
				return // what is left disturbs all others
			}
		}
	}
}

// effects are those of the whole operation.
func (s *crashNode) effects(t *testing.T) []killpoint.Effect {
	t.Helper()
	effects, _ := s.crash(t, 0)
	crashContinuations[0].run(t, s)
	return effects
}

// crash runs the operation with new claims and kills the driver before effect n,
// or after the last one.
func (s *crashNode) crash(t *testing.T, n int) (effects []killpoint.Effect, killed bool) {
	t.Helper()
	return s.crashFor(t, n, nil)
}

// crashFor is crash for some effects; nil: all.
func (s *crashNode) crashFor(t *testing.T, n int, counts func(killpoint.Effect) bool) (effects []killpoint.Effect, killed bool) {
	t.Helper()
	if s.last != nil {
		s.last.Kill() // it cleans up, too, and what it does is not counted
	}
	p := s.n.StartKillable(t, s.flags(harness.Quiet)...)
	s.allocate(t)
	s.settle(t, p.Driver)
	if s.operation.prepared {
		for _, c := range s.claims {
			p.MustPrepare(t, c)
		}
	}
	p.ArmFor(n, counts)
	err := s.operation.call(t.Context(), p.Driver, s.claims)
	effects, killed = p.Disarm()
	if !killed && err != nil {
		t.Fatal(err)
	}
	p.Kill()
	return effects, killed
}

// allocate makes the claims anew.
func (s *crashNode) allocate(t *testing.T) {
	t.Helper()
	s.claims = nil
	for _, devices := range s.layout.claims {
		var configs []harness.Config
		if s.layout.config != "" {
			configs = append(configs, s.layout.config)
		}
		s.claims = append(s.claims, s.n.Allocate(t, devices, configs...))
	}
}

// besideClaims reports whether an effect is on the files which the driver keeps beside those of
// claims. It writes them at any time, whatever claims do.
func (s *crashNode) besideClaims(e killpoint.Effect) bool {
	folder := filepath.Join(s.n.PluginsDir, harness.DriverName)
	return slices.ContainsFunc(e.Targets, func(path string) bool { return path == folder || filepath.Dir(path) == folder })
}

func (s *crashNode) shorten(e killpoint.Effect) string {
	text := e.String()
	for path, name := range map[string]string{s.n.Root: "root", s.n.CDIDir: "cdi", s.n.PluginsDir + "/" + harness.DriverName: "data", s.n.MPSDir: "mps"} {
		text = strings.ReplaceAll(text, path, name)
	}
	for i, c := range s.claims {
		text = strings.ReplaceAll(text, c.GetUid(), "claim"+strconv.Itoa(i))
	}
	return text
}
