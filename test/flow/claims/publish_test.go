// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/wait"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestPublished checks that the driver publishes what its slices command prints.
func TestPublished(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		machine string
		change  func(*machine.Machine)
		noGate  bool
	}{
		"partitionable":              {"dgx-h100", unchanged, false},
		"gate off":                   {"dgx-h100", unchanged, true},
		"no MIG":                     {"l4x1", unchanged, false},
		"Ampere with MIG mode on":    {"a100-80x1", harness.TurnMIGOn, false},
		"Ampere with the gate off":   {"a100-80x1", harness.TurnMIGOn, true},
		"no GPU but a driver":        {"l4x1", func(m *machine.Machine) { m.GPUs = nil }, false},
		"more counters than a slice": {"h100x16", unchanged, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, test.machine, test.change)
			n.API.DropCounters(test.noGate)
			p := n.Run(t)
			const told = "turn on the feature gate DRAPartitionableDevices"
			if test.noGate {
				p.WantLog(t, told)
			}
			if got := strings.Count(p.Log.String(), told); (got == 1) != test.noGate || got > 1 {
				t.Errorf("the log has %d lines about the feature gate", got)
			}
			want := printedSlices(t, n, !test.noGate)
			if diff := cmp.Diff(specs(want), specs(n.API.Slices()), quantities()); diff != "" {
				t.Errorf("slices (-printed +published):\n%s", diff)
			}
			p.Stop(t)
			expect.Equal(t, len(n.API.Slices()), len(want), "the driver removed slices when it was stopped")
		})
	}
}

// printedSlices runs the slices command.
func printedSlices(t *testing.T, n *harness.Node, partitionable bool) (all []resourceapi.ResourceSlice) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), harness.Built.Driver, "slices", "--node-name="+harness.NodeName, fmt.Sprintf("--partitionable-devices=%t", partitionable),
		"--driver-root="+n.Root, "--proc-root="+n.Root+"/proc", "--sys-root="+n.Root+"/sys", "--policy-file="+n.DefaultPolicy(),
		"--kubelet-plugins-dir="+n.PluginsDir, "-v=0")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil || stderr.Len() > 0 {
		t.Fatalf("slices: %v\n%s", err, stderr.String())
	}
	for decoder := utilyaml.NewYAMLOrJSONDecoder(&stdout, 4096); ; {
		var slice resourceapi.ResourceSlice
		err := decoder.Decode(&slice)
		if errors.Is(err, io.EOF) {
			return all
		}
		must.Do(t, err, "slices prints what is not YAML")
		if slice.Kind != "" { // otherwise it is what precedes the first document
			all = append(all, slice)
		}
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
	claim := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)})
	for _, dir := range []string{"usr", "dev"} {
		harness.Rename(t, filepath.Join(n.Root, dir), filepath.Join(n.Root, dir+".later"))
	}
	p := n.Start(t)
	p.Until(t, "liveness", p.Check("liveness"))
	expect.Fails(t, p.Check("readiness")(t.Context()), "ready without a driver")
	expect.Contains(t, p.Prepare(t, claim)[0].GetError(), "NVIDIA driver is not loaded", "prepare without a driver")
	p.MustUnprepare(t, claim)
	expect.Len(t, n.API.Slices(), 0, "slices are published without a driver")
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
func reregister(t *testing.T, n *harness.Node, p *harness.Driver) {
	t.Helper()
	uid := p.Cmd.Args[slices.IndexFunc(p.Cmd.Args, func(a string) bool { return strings.HasPrefix(a, "--pod-uid=") })]
	p.Register(t, n.RegistrarDir, strings.TrimPrefix(uid, "--pod-uid="))
}

// TestWrongNode checks that the driver ends with an error in one line where the cluster has
// no such node.
func TestWrongNode(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x1")
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), harness.Built.Driver, "--node-name=node-2", "--kubeconfig="+n.Kubeconfig,
		"--driver-root="+n.Root, "--proc-root="+n.Root+"/proc", "--sys-root="+n.Root+"/sys", "--cdi-root="+n.CDIDir,
		"--nvidia-cdi-hook="+harness.Built.NVIDIAHook, "--partage-hook="+harness.Built.Hook, "--kubelet-plugins-dir="+n.PluginsDir,
		"--kubelet-registrar-dir="+n.RegistrarDir, "-v=0")
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	// A call that returns meanwhile may say so in another line.
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains("\n"+stderr.String(), "\ngpu-kubelet-plugin: the cluster has no node named \"node-2\"") {
		t.Errorf("the driver ended with %v:\n%s", err, &stderr)
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
			n, p := harness.NewDriver(t, "h100x1")
			claim, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 0))
			restart(t, n, p)
			untilPrinted(t, p, n)
			p.WantLog(t, publishedAgain)
			p.MustPrepare(t, claim)
			p.MustUnprepare(t, claim)
			n.WantClean(t)
		})
	}
}

// TestCordonOfOneGPU: an administrator names GPUs in an annotation of the Node. Pods get no device of these, and those of the
// others.
func TestCordonOfOneGPU(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	n.API.Annotate(harness.NodeName, "partage.dev/cordoned-gpus", n.Address(t, 1))
	p := n.Run(t)
	// open are the devices of a GPU that pods may get. That nothing can start MPS on this node does not count.
	open := func(gpu int) (names []string) {
		devices := n.Published()
		for _, name := range n.DevicesOf(t, gpu) {
			if !slices.ContainsFunc(devices[name].Taints, func(t resourceapi.DeviceTaint) bool {
				return t.Effect != resourceapi.DeviceTaintEffectNone && !strings.HasSuffix(t.Key, "/mps-unavailable")
			}) {
				names = append(names, name)
			}
		}
		return names
	}
	p.UntilTrue(t, "the GPU to be cordoned", func() bool { return len(open(1)) == 0 })
	if all := n.DevicesOf(t, 0); len(all) == 0 || len(open(0)) != len(all) {
		t.Errorf("only %v of %v can be allocated of the GPU that is not cordoned", open(0), all)
	}
}

// renderedChart is what helm makes of the chart with its default values.
const renderedChart = "../../../deployments/helm/testdata/defaults.golden.yaml"

// chartClasses are the chart's DeviceClasses.
func chartClasses(t *testing.T) (classes []resourceapi.DeviceClass) {
	t.Helper()
	chart := must.Get(os.ReadFile(renderedChart))(t)
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(chart), 4096); ; {
		var class resourceapi.DeviceClass
		err := decoder.Decode(&class)
		if errors.Is(err, io.EOF) {
			return classes
		}
		if err == nil && class.Kind == "DeviceClass" { // otherwise an object of another kind
			classes = append(classes, class)
		}
	}
}

// selected are the published devices that a scheduler may allocate for a request of a class.
func selected(t *testing.T, n *harness.Node, class *resourceapi.DeviceClass) (names []string) {
	t.Helper()
	for name, d := range n.Published() {
		matches := true
		for _, selector := range class.Spec.Selectors {
			program := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(selector.CEL.Expression, cel.Options{})
			if program.Error != nil {
				t.Fatal(program.Error)
			}
			is, _, err := program.DeviceMatches(t.Context(), cel.Device{
				Driver: harness.DriverName, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
			})
			must.Do(t, err, "class", class.Name, "on device", name, "which ends the scheduling of pods")
			matches = matches && is
		}
		if matches {
			names = append(names, name)
		}
	}
	return names
}

// TestExtendedResourceNeedsKubelet: a kubelet older than 1.36 does not know extended resources that are devices: it starts a
// container that asks for nvidia.com/gpu without a GPU, while a device is allocated. So no device of its node is
// given out for it, whatever the version of the control plane.
func TestExtendedResourceNeedsKubelet(t *testing.T) {
	t.Parallel()
	for kubelet, want := range map[string]int{"v1.35.9": 0, "v1.36.0": 2, "vunknown": 0} {
		t.Run(strings.ReplaceAll(kubelet[1:], ".", "-"), func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			n.API.SetKubelet(harness.NodeName, kubelet)
			n.Run(t)
			got, wanted := map[string]int{}, map[string]int{"nvidia.com/gpu": want, "nvidia.com/gpu.shared": want, "claims": 2}
			for _, class := range chartClasses(t) {
				is := ptr.Deref(class.Spec.ExtendedResourceName, "")
				if class.Name == "gpu.nvidia.com" {
					got["claims"] += len(selected(t, n, &class))
				}
				if _, counts := wanted[is]; counts {
					got[is] += len(selected(t, n, &class))
				}
			}
			expect.Same(t, got, wanted, "devices that a node with kubelet", kubelet, "gives out, by extended resource")
		})
	}
}

const countLabel = "nvidia.com/gpu.count"

// TestLabelsOfNodeRegisteredAgain: a node that was deleted and has registered again gets its labels when it gets its slices: pods
// select nodes by them.
func TestLabelsOfNodeRegisteredAgain(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", "--node-labels=Write")
	labelled := func() bool { return n.API.Node(harness.NodeName).Labels[countLabel] == "2" }
	p.UntilTrue(t, "the labels of the node", labelled)
	n.API.DeleteNode(harness.NodeName)
	n.API.DeleteSlices() // the node owned them
	n.API.AddNode(harness.NodeName)
	reregister(t, n, p)
	uid := n.API.Node(harness.NodeName).UID
	p.UntilTrue(t, "the slices of the node as it is now", func() bool {
		all := n.API.Slices()
		return len(all) > 0 && all[0].OwnerReferences[0].UID == uid
	})
	const limit = time.Minute // is reached where the labels come minutes later
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, limit, true, func(context.Context) (bool, error) { return labelled(), nil }); err != nil {
		t.Error("a node that has registered again has its slices, and not the labels of its GPUs")
	}
}
