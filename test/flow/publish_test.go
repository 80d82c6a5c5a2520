// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestPublished: what the driver publishes is what its slices command prints.
func TestPublished(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		machine string
		change  func(*machine.Machine)
		noGate  bool
	}{
		"partitionable":              {machine: "dgx-h100"},
		"gate off":                   {machine: "dgx-h100", noGate: true},
		"no MIG":                     {machine: "l4x1"},
		"Ampere with MIG mode on":    {machine: "a100-80x1", change: migOn},
		"Ampere with the gate off":   {machine: "a100-80x1", change: migOn, noGate: true},
		"no GPU but a driver":        {machine: "l4x1", change: func(m *machine.Machine) { m.GPUs = nil }},
		"more counters than a slice": {machine: "h100x16"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			change := test.change
			if change == nil {
				change = func(*machine.Machine) {}
			}
			n := newNode(t, test.machine, change)
			n.api.DropCounters(test.noGate)
			p := n.start(t)
			p.ready(t)
			const told = "turn on the feature gate DRAPartitionableDevices"
			if got := strings.Count(p.log.String(), told); (got == 1) != test.noGate || got > 1 {
				t.Errorf("the log has %d lines about the feature gate", got)
			}
			want := n.printed(t, !test.noGate)
			if diff := cmp.Diff(specs(want), specs(n.api.Slices()), quantities()); diff != "" {
				t.Errorf("slices (-printed +published):\n%s", diff)
			}
			p.stop(t)
			if len(n.api.Slices()) != len(want) {
				t.Error("the driver removed slices when it was stopped")
			}
		})
	}
}

// printed runs the slices command.
func (n *node) printed(t *testing.T, partitionable bool) []resourceapi.ResourceSlice {
	t.Helper()
	flag := "--partitionable-devices"
	if !partitionable {
		flag += "=false"
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), built.plugin, "slices", "--node-name="+nodeName, flag,
		"--driver-root="+n.root, "--proc-root="+n.root+"/proc", "--sys-root="+n.root+"/sys", "-v=0")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("slices: %v\n%s", err, stderr.String())
	}
	if stderr.Len() > 0 {
		t.Errorf("slices writes to stderr:\n%s", stderr.String())
	}
	var all []resourceapi.ResourceSlice
	decoder := utilyaml.NewYAMLOrJSONDecoder(&stdout, 4096)
	for {
		var slice resourceapi.ResourceSlice
		err := decoder.Decode(&slice)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("slices prints what is not YAML: %v", err)
		}
		if slice.Kind == "" {
			continue // what precedes the first document
		}
		all = append(all, slice)
	}
}

// specs are the contents of slices, without what a missing MPS supervisor makes of
// them.
func specs(all []resourceapi.ResourceSlice) []resourceapi.ResourceSliceSpec {
	var specs []resourceapi.ResourceSliceSpec
	for _, slice := range all {
		slice.Spec.Pool.Generation = 0
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			d.Taints = slices.DeleteFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == driverName+"/mps-unavailable" })
			if len(d.Taints) == 0 {
				d.Taints = nil
			}
		}
		specs = append(specs, slice.Spec)
	}
	return specs
}

func quantities() cmp.Option {
	return cmp.Comparer(func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })
}

// TestDriverAppears: without the NVIDIA driver the plugin stays up, says why it
// is not ready and unprepares; once the driver is there it publishes.
func TestDriverAppears(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
	for _, dir := range []string{"usr", "dev"} {
		rename(t, filepath.Join(n.root, dir), filepath.Join(n.root, dir+".later"))
	}
	p := n.start(t)
	p.until(t, "liveness", p.check("liveness"))
	if err := p.check("readiness")(t.Context()); err == nil {
		t.Error("ready without a driver")
	}
	if got := p.prepare(t, claim)[0].GetError(); !strings.Contains(got, "NVIDIA driver is not loaded") {
		t.Errorf("prepare without a driver: %q", got)
	}
	p.mustUnprepare(t, claim)
	if slices := n.api.Slices(); len(slices) > 0 {
		t.Errorf("%d slices are published without a driver", len(slices))
	}
	p.wantLog(t, "NVIDIA driver is not loaded")

	for _, dir := range []string{"dev", "usr"} {
		rename(t, filepath.Join(n.root, dir+".later"), filepath.Join(n.root, dir))
	}
	again := n.untilAnew(t, p)
	p.ready(t)
	if diff := cmp.Diff(specs(n.printed(t, true)), specs(n.api.Slices()), quantities()); diff != "" {
		t.Errorf("slices (-printed +published):\n%s", diff)
	}
	again.mustPrepare(t, claim)
	again.mustUnprepare(t, claim)
	n.wantClean(t)
}

// untilAnew connects again to a driver that starts anew because its device root
// has moved, and makes its sockets anew.
func (n *node) untilAnew(t *testing.T, p *process) *process {
	t.Helper()
	p.until(t, "new sockets", func(context.Context) error {
		if !strings.Contains(p.log.String(), "Starting anew") {
			return errors.New("the driver still has the old ones")
		}
		return nil
	})
	return n.reregister(t, p)
}

// reregister connects again, as a kubelet does that was started again.
func (n *node) reregister(t *testing.T, p *process) *process {
	t.Helper()
	uid := p.cmd.Args[slices.IndexFunc(p.cmd.Args, func(a string) bool { return strings.HasPrefix(a, "--pod-uid=") })]
	p.register(t, n.registrar, strings.TrimPrefix(uid, "--pod-uid="))
	return p
}

// TestRollingUpdate: the new instance serves before the old one ends, and either
// may be called.
func TestRollingUpdate(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	before := n.start(t)
	one := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
	two := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 1)}))
	before.mustPrepare(t, one)
	after := n.start(t)
	after.mustPrepare(t, two)
	before.mustUnprepare(t, two)
	before.stop(t)
	after.ready(t)
	after.mustUnprepare(t, one)
	n.wantClean(t)
}

// TestWrongNode: one line, and not zero.
func TestWrongNode(t *testing.T) {
	t.Parallel()
	n := newNode(t, "l4x1")
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), built.plugin, "--node-name=node-2", "--kubeconfig="+n.kubeconfig,
		"--driver-root="+n.root, "--proc-root="+n.root+"/proc", "--sys-root="+n.root+"/sys", "--cdi-root="+n.cdi,
		"--nvidia-cdi-hook="+built.hook, "--mps-supervisor-program="+built.supervisor, "--kubelet-plugins-dir="+n.plugins, "--kubelet-registrar-dir="+n.registrar,
		"--health-port=0", "-v=0")
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the driver ended with %v", err)
	}
	lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, `the cluster has no node named "node-2"`) {
		t.Errorf("the last line is %q", last)
	}
}

// untilPrinted waits until what is published is what the slices command prints.
func (p *process) untilPrinted(t *testing.T, n *node) {
	t.Helper()
	want := specs(n.printed(t, true))
	p.until(t, "the slices of the machine as it is", func(context.Context) error {
		if diff := cmp.Diff(want, specs(n.api.Slices()), quantities()); diff != "" {
			return fmt.Errorf("slices (-printed +published):\n%s", diff)
		}
		return nil
	})
}

// publishedAgain is what the driver says when it puts slices back at once. The
// slice controller does so without a word, after half a minute.
const publishedAgain = "ResourceSlices were deleted, publishing them again"

// TestKubeletRestart: a kubelet that starts deletes the slices of its node, and
// registers the driver sooner or later than that.
func TestKubeletRestart(t *testing.T) {
	t.Parallel()
	for name, restart := range map[string]func(*testing.T, *node, *process){
		"deleted, then registered": func(t *testing.T, n *node, p *process) {
			n.api.DeleteSlices()
			n.reregister(t, p)
		},
		"registered, then deleted": func(t *testing.T, n *node, p *process) {
			n.reregister(t, p)
			p.untilPrinted(t, n)
			n.api.DeleteSlices()
		},
		"one deleted by hand": func(_ *testing.T, n *node, _ *process) {
			n.api.DeleteSlice(n.api.Slices()[1].Name)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x1")
			p := n.start(t)
			p.ready(t)
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
			p.mustPrepare(t, claim)
			restart(t, n, p)
			p.untilPrinted(t, n)
			p.wantLog(t, publishedAgain)
			p.mustPrepare(t, claim)
			p.mustUnprepare(t, claim)
			n.wantClean(t)
		})
	}
}

// TestGPULost: its devices stay published and are tainted until it is back, and
// the other GPU is used meanwhile.
func TestGPULost(t *testing.T) {
	t.Parallel()
	for reason, code := range map[string]int{"lost": 15, "reset-required": 16} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x2")
			n.startSupervisor(t)
			p := n.start(t)
			p.ready(t)
			p.untilPrinted(t, n)
			all := n.devicesOf(t, 1)
			fail := func(code int) {
				t.Helper()
				if err := n.state.Update(func(m *machine.Machine) error {
					m.GPUs[1].Failure = code
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			fail(code)
			p.untilTainted(t, n, reason, all)
			p.untilEvent(t, n, map[string]string{"lost": "GPULost", "reset-required": "GPUResetRequired"}[reason], n.address(t, 1))
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
			p.mustPrepare(t, claim)
			p.mustUnprepare(t, claim)
			for _, service := range []string{"liveness", "readiness"} {
				if err := p.check(service)(t.Context()); err != nil {
					t.Error(err)
				}
			}
			fail(0)
			p.untilTainted(t, n, reason, nil)
			p.untilPrinted(t, n)
			told := 0
			for _, e := range n.events(t) {
				if strings.Contains(e.Message, n.address(t, 1)) && e.InvolvedObject.Kind == "Node" {
					told += int(e.Count)
				}
			}
			if told != 1 {
				t.Errorf("%d events, want one: %+v", told, n.events(t))
			}
		})
	}
}

// TestDriverUnloaded: while the driver is away nothing is allocated and pods can
// end; it comes back by itself.
func TestDriverUnloaded(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t)
	p.ready(t)
	claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
	p.mustPrepare(t, claim)

	const driverNotLoaded = 9
	away := n.inject(t, machine.Fault{Function: "*", GPU: -1, Code: driverNotLoaded})
	p.untilTainted(t, n, "unresponsive", append(n.devicesOf(t, 0), n.devicesOf(t, 1)...))
	p.until(t, "the driver not to be ready", func(ctx context.Context) error {
		if err := p.check("readiness")(ctx); err == nil {
			return errors.New("it is")
		}
		return nil
	})
	if err := p.check("liveness")(t.Context()); err != nil {
		t.Error(err)
	}
	p.mustUnprepare(t, claim)

	away.remove(t)
	p.ready(t)
	p.untilPrinted(t, n)
	p.until(t, "the partition to be removed", func(context.Context) error {
		if left := n.instances(t); len(left) > 0 {
			return fmt.Errorf("left: %+v", left)
		}
		return nil
	})
	p.mustPrepare(t, claim)
}
