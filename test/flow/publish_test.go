// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"bytes"
	"errors"
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

func specs(all []resourceapi.ResourceSlice) []resourceapi.ResourceSliceSpec {
	var specs []resourceapi.ResourceSliceSpec
	for _, slice := range all {
		slice.Spec.Pool.Generation = 0
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
	claim := n.allocate(n.names(t, []request{{0, "1g.10gb", 0}}))
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
	p.ready(t)
	if diff := cmp.Diff(specs(n.printed(t, true)), specs(n.api.Slices()), quantities()); diff != "" {
		t.Errorf("slices (-printed +published):\n%s", diff)
	}
	again := n.reregister(t, p)
	again.mustPrepare(t, claim)
	again.mustUnprepare(t, claim)
	n.wantClean(t)
}

// reregister connects again, as the kubelet does when the sockets were made anew.
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
	one := n.allocate(n.names(t, []request{{0, "1g.10gb", 0}}))
	two := n.allocate(n.names(t, []request{{0, "1g.10gb", 1}}))
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
		"--nvidia-cdi-hook="+built.hook, "--kubelet-plugins-dir="+n.plugins, "--kubelet-registrar-dir="+n.registrar,
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
