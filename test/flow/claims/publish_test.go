// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

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
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestPublished checks that the driver publishes what its slices command prints.
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
		"Ampere with MIG mode on":    {machine: "a100-80x1", change: harness.TurnMIGOn},
		"Ampere with the gate off":   {machine: "a100-80x1", change: harness.TurnMIGOn, noGate: true},
		"no GPU but a driver":        {machine: "l4x1", change: func(m *machine.Machine) { m.GPUs = nil }},
		"more counters than a slice": {machine: "h100x16"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			change := test.change
			if change == nil {
				change = func(*machine.Machine) {}
			}
			n := harness.NewNode(t, test.machine, change)
			n.API.DropCounters(test.noGate)
			p := n.Start(t)
			p.Ready(t)
			const told = "turn on the feature gate DRAPartitionableDevices"
			if test.noGate {
				p.Until(t, "the log of what is left out", func(context.Context) error {
					if !strings.Contains(p.Log.String(), told) {
						return errors.New("nothing yet")
					}
					return nil
				})
			}
			if got := strings.Count(p.Log.String(), told); (got == 1) != test.noGate || got > 1 {
				t.Errorf("the log has %d lines about the feature gate", got)
			}
			want := printedSlices(t, n, !test.noGate)
			if diff := cmp.Diff(specs(want), specs(n.API.Slices()), quantities()); diff != "" {
				t.Errorf("slices (-printed +published):\n%s", diff)
			}
			p.Stop(t)
			if len(n.API.Slices()) != len(want) {
				t.Error("the driver removed slices when it was stopped")
			}
		})
	}
}

// printedSlices runs the slices command.
func printedSlices(t *testing.T, n *harness.Node, partitionable bool) []resourceapi.ResourceSlice {
	t.Helper()
	flag := "--partitionable-devices"
	if !partitionable {
		flag += "=false"
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), harness.Built.Driver, "slices", "--node-name="+harness.NodeName, flag,
		"--driver-root="+n.Root, "--proc-root="+n.Root+"/proc", "--sys-root="+n.Root+"/sys", "--policy-file="+n.DefaultPolicy(),
		"--kubelet-plugins-dir="+n.PluginsDir, "-v=0")
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

// specs are the contents of slices without the taints for a missing MPS supervisor, and for events that are not received, which
// has no effect and goes with the next other write.
func specs(all []resourceapi.ResourceSlice) []resourceapi.ResourceSliceSpec {
	var specs []resourceapi.ResourceSliceSpec
	for _, slice := range all {
		slice.Spec.Pool.Generation = 0
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			d.Taints = slices.DeleteFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
				return t.Key == harness.DriverName+"/mps-unavailable" || t.Key == harness.DriverName+"/unmonitored"
			})
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

// TestDriverAppears checks that the plugin runs without the NVIDIA driver, logs why it is
// not ready, and unprepares; once the driver is there it publishes.
func TestDriverAppears(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	for _, dir := range []string{"usr", "dev"} {
		harness.Rename(t, filepath.Join(n.Root, dir), filepath.Join(n.Root, dir+".later"))
	}
	p := n.Start(t)
	p.Until(t, "liveness", p.Check("liveness"))
	if err := p.Check("readiness")(t.Context()); err == nil {
		t.Error("ready without a driver")
	}
	if got := p.Prepare(t, claim)[0].GetError(); !strings.Contains(got, "NVIDIA driver is not loaded") {
		t.Errorf("prepare without a driver: %q", got)
	}
	p.MustUnprepare(t, claim)
	if slices := n.API.Slices(); len(slices) > 0 {
		t.Errorf("%d slices are published without a driver", len(slices))
	}
	p.WantLog(t, "NVIDIA driver is not loaded")

	for _, dir := range []string{"dev", "usr"} {
		harness.Rename(t, filepath.Join(n.Root, dir+".later"), filepath.Join(n.Root, dir))
	}
	p.Ready(t)
	if diff := cmp.Diff(specs(printedSlices(t, n, true)), specs(n.API.Slices()), quantities()); diff != "" {
		t.Errorf("slices (-printed +published):\n%s", diff)
	}
	p.MustPrepare(t, claim)
	p.MustUnprepare(t, claim)
	n.WantClean(t)
}

// reregister connects again, like a kubelet that was restarted.
func reregister(t *testing.T, n *harness.Node, p *harness.Driver) *harness.Driver {
	t.Helper()
	uid := p.Cmd.Args[slices.IndexFunc(p.Cmd.Args, func(a string) bool { return strings.HasPrefix(a, "--pod-uid=") })]
	p.Register(t, n.RegistrarDir, strings.TrimPrefix(uid, "--pod-uid="))
	return p
}

// TestRollingUpdate checks that the new instance serves before the old one ends, and that
// either may be called.
func TestRollingUpdate(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	before := n.Start(t)
	one := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	two := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 1)}))
	before.MustPrepare(t, one)
	after := n.Start(t)
	after.MustPrepare(t, two)
	before.MustUnprepare(t, two)
	before.Stop(t)
	after.Ready(t)
	after.MustUnprepare(t, one)
	n.WantClean(t)
}

// TestWrongNode checks that the driver ends with an error in one line where the cluster has
// no such node.
func TestWrongNode(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x1")
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), harness.Built.Driver, "--node-name=node-2", "--kubeconfig="+n.Kubeconfig,
		"--driver-root="+n.Root, "--proc-root="+n.Root+"/proc", "--sys-root="+n.Root+"/sys", "--cdi-root="+n.CDIDir,
		"--nvidia-cdi-hook="+harness.Built.NVIDIAHook, "--partage-hook="+harness.Built.Hook, "--kubelet-plugins-dir="+n.PluginsDir, "--kubelet-registrar-dir="+n.RegistrarDir,
		"-v=0")
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the driver ended with %v", err)
	}
	// A call that returns meanwhile may say so in the line after that.
	lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
	const want = `gpu-kubelet-plugin: the cluster has no node named "node-2"`
	if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) }) {
		t.Errorf("no line says why:\n%s", &stderr)
	}
}

// untilPrinted waits until what is published is what the slices command prints.
func untilPrinted(t *testing.T, p *harness.Driver, n *harness.Node) {
	t.Helper()
	want := specs(printedSlices(t, n, true))
	p.Until(t, "the slices of the machine as it is", func(context.Context) error {
		if diff := cmp.Diff(want, specs(n.API.Slices()), quantities()); diff != "" {
			return fmt.Errorf("slices (-printed +published):\n%s", diff)
		}
		return nil
	})
}

// publishedAgain is what the driver logs when it restores slices at once. The slice
// controller does so after half a minute, and logs nothing.
const publishedAgain = "Publishing the ResourceSlices again"

// TestKubeletRestart checks that slices come back at once. A kubelet that starts deletes
// the slices of its node, before or after it registers the driver.
func TestKubeletRestart(t *testing.T) {
	t.Parallel()
	for name, restart := range map[string]func(*testing.T, *harness.Node, *harness.Driver){
		"deleted, then registered": func(t *testing.T, n *harness.Node, p *harness.Driver) {
			n.API.DeleteSlices()
			reregister(t, n, p)
		},
		"registered, then deleted": func(t *testing.T, n *harness.Node, p *harness.Driver) {
			reregister(t, n, p)
			untilPrinted(t, p, n)
			n.API.DeleteSlices()
		},
		"one deleted by hand": func(_ *testing.T, n *harness.Node, _ *harness.Driver) {
			n.API.DeleteSlice(n.API.Slices()[1].Name)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			p := n.Start(t)
			p.Ready(t)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
			p.MustPrepare(t, claim)
			restart(t, n, p)
			untilPrinted(t, p, n)
			p.WantLog(t, publishedAgain)
			p.MustPrepare(t, claim)
			p.MustUnprepare(t, claim)
			n.WantClean(t)
		})
	}
}

// untilPodTold waits for an event about a pod.
func untilPodTold(t testing.TB, p *harness.Driver, n *harness.Node, pod, reason string) {
	t.Helper()
	p.Until(t, "event "+reason+" of the pod", func(context.Context) error {
		events := n.Events(t)
		if !slices.ContainsFunc(events, func(e corev1.Event) bool {
			return e.InvolvedObject.Kind == "Pod" && e.InvolvedObject.Name == pod && e.Reason == reason
		}) {
			return fmt.Errorf("there are %+v", events)
		}
		return nil
	})
}

// TestGPULost checks that the devices of a lost GPU stay published and are tainted until
// it is back, that the pods which have them are told, and that the other GPU can be used.
func TestGPULost(t *testing.T) {
	t.Parallel()
	for reason, code := range map[string]int{"gpu-lost": 15, "reset-required": 16} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			n.StartSupervisor(t)
			p := n.Start(t)
			p.Ready(t)
			untilPrinted(t, p, n)
			all := n.DevicesOf(t, 1)
			fail := func(code int) {
				t.Helper()
				if err := n.State.Update(func(m *machine.Machine) error {
					m.GPUs[1].Failure = code
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			used := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 0)}))
			n.API.Reserve(used.GetNamespace(), used.GetName(), "user")
			p.MustPrepare(t, used)
			fail(code)
			p.UntilTainted(t, n, reason, all)
			untilPodTold(t, p, n, "user", map[string]string{"gpu-lost": "GPULost", "reset-required": "GPUResetRequired"}[reason])
			p.UntilEvent(t, n, map[string]string{"gpu-lost": "GPULost", "reset-required": "GPUResetRequired"}[reason], n.Address(t, 1))
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
			p.MustPrepare(t, claim)
			p.MustUnprepare(t, claim)
			for _, service := range []string{"liveness", "readiness"} {
				if err := p.Check(service)(t.Context()); err != nil {
					t.Error(err)
				}
			}
			fail(0)
			p.UntilTainted(t, n, reason, nil)
			untilPrinted(t, p, n)
			p.UntilEvent(t, n, "GPURecovered", n.Address(t, 1))
			untilPodTold(t, p, n, "user", "GPURecovered")
			p.MustUnprepare(t, used)
			told := 0
			for _, e := range n.Events(t) {
				if strings.Contains(e.Message, n.Address(t, 1)) && e.InvolvedObject.Kind == "Node" && e.Type == corev1.EventTypeWarning {
					told += int(e.Count)
				}
			}
			if told != 1 {
				t.Errorf("%d events, want one: %+v", told, n.Events(t))
			}
		})
	}
}

// TestDriverUnloaded checks that all devices are tainted and pods can end while the NVIDIA
// driver is unloaded, and that all recovers by itself.
func TestDriverUnloaded(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	p.Ready(t)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	p.MustPrepare(t, claim)

	const driverNotLoaded = 9
	away := n.Inject(t, machine.Fault{Function: "*", GPU: -1, Code: driverNotLoaded})
	p.UntilTainted(t, n, "unresponsive", append(n.DevicesOf(t, 0), n.DevicesOf(t, 1)...))
	p.Until(t, "the driver not to be ready", func(ctx context.Context) error {
		if err := p.Check("readiness")(ctx); err == nil {
			return errors.New("it is")
		}
		return nil
	})
	if err := p.Check("liveness")(t.Context()); err != nil {
		t.Error(err)
	}
	p.MustUnprepare(t, claim)

	away.Remove(t)
	p.Ready(t)
	untilPrinted(t, p, n)
	p.Until(t, "the partition to be removed", func(context.Context) error {
		if left := n.Instances(t); len(left) > 0 {
			return fmt.Errorf("left: %+v", left)
		}
		return nil
	})
	p.MustPrepare(t, claim)
}
