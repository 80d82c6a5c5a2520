// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

// example is a fleet with a bit of everything.
func example(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("hopper", "h100-80-sxm", 3).Labels["pool"] = "big"
	f.AddNode("small", "t4", 1)
	f.AddPartitionedNode("old", "a30", 1)
	trains := f.Held("team", "training", "hopper", fleettest.Request("mig.nvidia.com", fleettest.Profile("3g.40gb")))
	f.Run(trains, "hopper").Status.Phase = corev1.PodPending
	f.Held("other", "inference", "hopper", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.20gb")))
	f.Held("team", "notebook", "hopper", fleettest.Share("mps.partage.dev", "10Gi", "30"))
	f.Held("other", "notebook", "hopper", fleettest.Share("mps.partage.dev", "20Gi", ""))
	f.Held("team", "turns", "small", fleettest.Request("timeslice.partage.dev"))
	gone := f.Held("team", "gone", "old", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.6gb")))
	gone.Status.Allocation.Devices.Results[0].Device = "gpu-that-is-gone"

	result := trains.Status.Allocation.Devices.Results[0]
	data, err := json.Marshal(api.DeviceStatus{
		TypeMeta: metav1.TypeMeta{APIVersion: api.StatusVersion, Kind: api.DeviceStatusKind}, UUID: "MIG-00000000-0000-4000-8000-000000000001",
	})
	if err != nil {
		t.Fatal(err)
	}
	trains.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: result.Driver, Pool: result.Pool, Device: result.Device, Data: &runtime.RawExtension{Raw: data},
		Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionFalse, Reason: "GPULost", Message: "The GPU is \x1b[31mlost"}},
	}}
	f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: new("small")},
		Taint:          resourceapi.DeviceTaint{Key: "example.com/maintenance", Value: "friday", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}})
	f.Nodes[2].Spec.Unschedulable = true
	f.Nodes[2].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown"}}
	return f
}

func treeOf(t *testing.T, selector labels.Selector, nodes ...string) *Tree {
	t.Helper()
	tree, err := New(fleet.New(example(t).Snapshot, fleettest.Driver), nodes, selector)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	fleettest.Golden(t, *update, name, got)
}

func TestView(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		file   string
		format printer.Format
		nodes  []string
	}{
		{"team.txt", printer.Format{}, nil},
		{"all-wide.txt", printer.Format{Wide: true}, nil},
		{"colour.txt", printer.Format{Color: true}, []string{"hopper", "old"}},
	} {
		t.Run(c.file, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			if err := View(treeOf(t, labels.Everything(), c.nodes...)).Write(&out, c.format); err != nil {
				t.Fatal(err)
			}
			golden(t, c.file, out.String())
		})
	}
}

func TestObject(t *testing.T) {
	t.Parallel()
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.Output = options.OutputYAML
	tree := treeOf(t, labels.Everything(), "hopper")
	if err := printer.Print(o, tree, View(tree)); err != nil {
		t.Fatal(err)
	}
	golden(t, "hopper.yaml", out.String())
}

func TestSelection(t *testing.T) {
	t.Parallel()
	m := fleet.New(example(t).Snapshot, fleettest.Driver)
	for _, c := range []struct {
		selector string
		nodes    []string
		want     []string
		fails    string
	}{
		{"", nil, []string{"hopper", "old", "small"}, ""},
		{"pool=big", nil, []string{"hopper"}, ""},
		{"pool!=big", []string{"hopper", "old"}, []string{"old"}, ""},
		{"", []string{"nowhere"}, nil, "node nowhere has no devices of driver gpu.nvidia.com; nodes with some: hopper, old, small"},
	} {
		selector, err := labels.Parse(c.selector)
		if err != nil {
			t.Fatal(err)
		}
		tree, err := New(m, c.nodes, selector)
		if c.fails != "" {
			if err == nil || err.Error() != c.fails {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		var got []string
		for _, n := range tree.Nodes {
			got = append(got, n.Name)
		}
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("%+v: %v\n%s", c, err, diff)
		}
	}
}

// TestRun: the command from the clients to the output.
func TestRun(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
	f := example(t)
	for _, s := range f.Slices {
		if err := client.Tracker().Add(s); err != nil {
			t.Fatal(err)
		}
	}
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.AllNamespaces, o.Output = true, options.OutputName
	if err := Run(t.Context(), o, client, nil); err != nil || out.String() != "node/hopper\nnode/old\nnode/small\n" {
		t.Errorf("%v, %s", err, out.String())
	}
	o.Selector = "a==="
	if err := Run(t.Context(), o, client, nil); err == nil || !strings.HasPrefix(err.Error(), "-l a===: it must be a label selector") {
		t.Error(err)
	}
	o.Selector, o.Output, o.Driver = "", "", "other.example.com"
	out.Reset()
	if err := Run(t.Context(), o, client, nil); err != nil || out.String() != "No node has devices of driver other.example.com.\n" {
		t.Errorf("%v, %q", err, out.String())
	}
}

// TestWithoutSlices: without the right to list them, nothing can be said.
func TestWithoutSlices(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
	client.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no right"))
	})
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.AllNamespaces = true
	if err := Run(t.Context(), o, client, nil); !apierrors.IsForbidden(err) || out.String() != "" {
		t.Errorf("%v, %s", err, out.String())
	}
}

// TestHiddenClaims: what may be somebody's is not free.
func TestHiddenClaims(t *testing.T) {
	t.Parallel()
	for resource, shared := range map[string]string{fleet.ResourceClaims: "shared by at least 1 of at most 4", fleet.ResourceTaintRules: "shared by 1 of at most 4"} {
		hidden := fleet.Missing{Resource: resource}
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 2)
		f.AddNode("n2", "h100-80-sxm", 1)
		f.Held("team", "share", "n2", fleettest.Share("mps.partage.dev", "10Gi", "30"))
		f.Held("team", "own", "n1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
		f.Missing = []fleet.Missing{hidden}
		tree, err := New(fleet.New(f.Snapshot, fleettest.Driver), nil, labels.Everything())
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := View(tree).Write(&out, printer.Format{}); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"[???????] GPU 1 (28:00)", "[??????A] GPU 0 (1b:00)", "fits: unknown, at most whole GPU", "Largest that still fits: unknown, at most a whole GPU", shared} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("want %q in:\n%s", want, out.String())
			}
		}
	}
}

// TestColumns: it fits into 80 columns, with GPUs of every model, names as controllers make them, taints and messages.
func TestColumns(t *testing.T) {
	t.Parallel()
	for _, board := range fleettest.Boards(t) {
		f := fleettest.New(t)
		f.AddNode("worker-gpu-01", board, 8)
		f.Held("inference", "vllm-7d9f8b6c4-x2k9q-gpu-8zq4p", "worker-gpu-01", fleettest.Request("gpu.nvidia.com"))
		f.Held("notebooks", "jupyter-0-gpu-x7k2p", "worker-gpu-01", fleettest.Request("timeslice.partage.dev"))
		for _, p := range f.Pods {
			p.Labels = map[string]string{"pod-template-hash": "7d9f8b6c4"}
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "vllm-7d9f8b6c4", Controller: new(true)}}
		}
		f.Pods[0].Name = "vllm-7d9f8b6c4-x2k9q"
		f.Claims[0].Status.ReservedFor[0].Name = f.Pods[0].Name
		result := f.Claims[0].Status.Allocation.Devices.Results[0]
		f.Claims[0].Status.Devices = []resourceapi.AllocatedDeviceStatus{{
			Driver: result.Driver, Pool: result.Pool, Device: result.Device,
			Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionFalse, Reason: "GPULost", Message: strings.Repeat("the GPU is lost ", 10)}},
		}}
		f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Device: new("gpu-0000-28-00-0")},
			Taint:          resourceapi.DeviceTaint{Key: "gpu.nvidia.com/recovery-required", Value: "reset", Effect: resourceapi.DeviceTaintEffectNoExecute},
		}})
		tree, err := New(fleet.New(f.Snapshot, fleettest.Driver), nil, labels.Everything())
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := View(tree).Write(&out, printer.Format{}); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out.String()) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); n > 80 {
				t.Errorf("%s: %d columns: %s", board, n, line)
			}
		}
		if !strings.Contains(out.String(), "pod inference/vllm-7d9f8b6c4-x2k9q (Deployment)") || strings.Contains(out.String(), "gpu-8zq4p") {
			t.Errorf("claims are named instead of pods:\n%s", out.String())
		}
	}
}

// TestUnseenPods: a claim names the pods that it is reserved for, whoever may read them.
func TestUnseenPods(t *testing.T) {
	t.Parallel()
	f := example(t)
	f.Pods = nil
	tree, err := New(fleet.New(f.Snapshot, fleettest.Driver), []string{"hopper"}, labels.Everything())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := View(tree).Write(&out, printer.Format{}); err != nil || !strings.Contains(out.String(), "pod other/inference\n") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// TestNothingChosen: that labels choose no node does not say that there is none, and no labels are known of nodes that may not be read.
func TestNothingChosen(t *testing.T) {
	t.Parallel()
	selector, err := labels.Parse("pool=typo")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := View(treeOf(t, selector)).Write(&out, printer.Format{}); err != nil || strings.Contains(out.String(), "No node has devices") {
		t.Errorf("%v, %q", err, out.String())
	}
}

// TestLargest: of partitions with as much memory the one with more compute slices is the larger, as in what fits.
func TestLargest(t *testing.T) {
	t.Parallel()
	with := func(profiles ...string) GPU {
		var g GPU
		for _, p := range profiles {
			memory, _, _ := strings.Cut(p[strings.Index(p, ".")+1:], "gb")
			gib, _ := strconv.ParseInt(memory, 10, 64)
			g.Free.Partitions = append(g.Free.Partitions, fleet.PartitionRoom{Profile: p, Count: 1, MemoryBytes: gib << 30})
		}
		return g
	}
	three, both := with("1g.10gb", "3g.40gb"), with("1g.10gb", "3g.40gb", "4g.40gb")
	for want, gpus := range map[string][]GPU{
		"a partition 4g.40gb, on 2 of the GPUs": {three, both, both},
		"a partition 4g.40gb, on 1 of the GPUs": {both, three},
		"a partition 3g.40gb, on 1 of the GPUs": {three, with("1g.10gb")},
	} {
		tree := &Tree{Nodes: []Node{{GPUs: gpus}}}
		if got := tree.largest(); got != "Largest that still fits: "+want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestPending: what is left of a claim, and memory that waits for a repair, are shown, whatever the effect and however few devices have it.
func TestPending(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	for key, r := range map[string]struct {
		device *string
		effect resourceapi.DeviceTaintEffect
	}{
		"release-pending":   {new("gpu-0000-1b-00-0-mig-1g10gb-6"), resourceapi.DeviceTaintEffectNoSchedule},
		"row-remap-pending": {nil, resourceapi.DeviceTaintEffectNone},
	} {
		f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Device: r.device},
			Taint:          resourceapi.DeviceTaint{Key: fleettest.Driver + "/" + key, Effect: r.effect},
		}})
	}
	tree, err := New(fleet.New(f.Snapshot, fleettest.Driver), nil, labels.Everything())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := View(tree).Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"taint gpu.nvidia.com/release-pending:NoSchedule on 1 of ", "taint gpu.nvidia.com/row-remap-pending:None on all devices"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %q in:\n%s", want, &out)
		}
	}
}

// TestLargestForNobody: what is free on a node that takes no pods, or has a taint, nobody gets.
func TestLargestForNobody(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	for _, name := range []string{"cordoned", "not-ready", "tainted", "shared"} {
		f.AddNode(name, "h100-80-sxm", 1)
	}
	f.Nodes[0].Spec.Unschedulable = true
	f.Nodes[1].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: new("tainted")},
		Taint:          resourceapi.DeviceTaint{Key: "maintenance", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}})
	f.Held("team", "own", "shared", fleettest.Request("mig.nvidia.com", fleettest.Profile("4g.40gb")))
	tree, err := New(fleet.New(f.Snapshot, fleettest.Driver), nil, labels.Everything())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := tree.largest(), "Largest that still fits: a partition 3g.40gb, on 1 of the GPUs"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestCut: a message is as long as the columns that a terminal shows it in.
func TestCut(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		strings.Repeat("a", mostCut): strings.Repeat("a", mostCut), strings.Repeat("a", mostCut+1): strings.Repeat("a", mostCut-3) + "...",
		strings.Repeat("망", mostCut/2): strings.Repeat("망", mostCut/2), strings.Repeat("망", mostCut): strings.Repeat("망", (mostCut-3)/2) + "...",
	} {
		if got := (renderer{}).cut(text); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if long := strings.Repeat("망", 100); (renderer{printer.Format{Wide: true}}).cut(long) != long {
		t.Error("-o wide does not have the rest")
	}
}
