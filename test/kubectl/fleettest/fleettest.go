// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleettest makes Snapshots for tests: nodes with the boards of package boards, the classes of the chart, and claims that the scheduler's allocator has allocated.
package fleettest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/policy"
)

// Driver is the name of the driver.
const Driver = "gpu.nvidia.com"

// Start is when everything in a Fleet was made.
var Start = time.Date(2026, time.November, 20, 8, 0, 0, 0, time.UTC)

// Fleet is a Snapshot that grows.
type Fleet struct {
	*fleet.Snapshot
	tb  testing.TB
	uid int
}

// New returns a fleet without nodes that has the classes of the chart.
func New(tb testing.TB) *Fleet {
	tb.Helper()
	f := &Fleet{Snapshot: &fleet.Snapshot{}, tb: tb}
	for name, kind := range map[string]string{
		"gpu.nvidia.com": "gpu", "mig.nvidia.com": "mig", "mps.partage.dev": "mps", "timeslice.partage.dev": "timeslice", "observer.partage.dev": "observer",
	} {
		f.Classes = append(f.Classes, Class(name, fmt.Sprintf("device.driver == '%[1]s' && device.attributes['%[1]s'].type == '%[2]s'", Driver, kind)))
	}
	return f
}

// Class returns a class with one selector.
func Class(name, expression string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{Selectors: Selectors(expression)}}
}

// Boards returns the names of all boards.
func Boards(tb testing.TB) []string {
	tb.Helper()
	names := boards.Names()
	if len(names) < 13 {
		tb.Fatalf("only the boards %v", names)
	}
	return names
}

// Terms returns the policy that the driver has unless it is given one.
func Terms() device.Terms { return device.Terms{Policy: policy.Builtin()} }

// AddNode adds a node with a number of GPUs of a board, as the driver publishes them.
func (f *Fleet) AddNode(name, board string, gpus int) *corev1.Node {
	f.tb.Helper()
	return f.AddNodeOf(name, f.machine(name, board, gpus, false), Terms())
}

// AddPartitionedNode is AddNode with MIG mode on, for boards whose mode the driver leaves alone.
func (f *Fleet) AddPartitionedNode(name, board string, gpus int) *corev1.Node {
	f.tb.Helper()
	return f.AddNodeOf(name, f.machine(name, board, gpus, true), Terms())
}

// AddPairs is AddNode with NVLink between the first GPU and the second, the third and the fourth…
func (f *Fleet) AddPairs(name, board string, gpus int) *corev1.Node {
	f.tb.Helper()
	facts := f.machine(name, board, gpus, false)
	for i := range facts.GPUs {
		facts.GPUs[i].NVLink = &gpu.NVLink{GPUs: []string{facts.GPUs[i^1].PCIAddress}}
	}
	return f.AddNodeOf(name, facts, Terms())
}

// AddNetworkCard gives a node a card of another driver, with a class of the driver's name.
func (f *Fleet) AddNetworkCard(node, driver, pcieRoot string) {
	if !slices.ContainsFunc(f.Classes, func(c *resourceapi.DeviceClass) bool { return c.Name == driver }) {
		f.Classes = append(f.Classes, Class(driver, fmt.Sprintf("device.driver == '%s'", driver)))
	}
	f.Slices = append(f.Slices, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: node + "-" + driver},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "nic-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"resource.kubernetes.io/pcieRoot": {StringValue: &pcieRoot},
			}}},
		},
	})
}

// GPUOf returns the UUID of a GPU of a node.
func GPUOf(node string, index int) string { return uuidOf(node, index) }

// AddNodeOf adds a node of which the facts are given.
func (f *Fleet) AddNodeOf(name string, facts *gpu.Node, terms device.Terms) *corev1.Node {
	f.tb.Helper()
	inventory, err := device.NewInventory(facts, terms)
	if err != nil {
		f.tb.Fatal(err)
	}
	objects := inventory.ResourceSlices(device.Options{
		Driver: Driver, Pool: name, NodeName: name, PartitionableDevices: true, ConsumableCapacity: true,
	})
	for i := range objects {
		// As the controller names them: in this order.
		objects[i].Name = fmt.Sprintf("%s-%04x", name, i)
		f.Slices = append(f.Slices, &objects[i])
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.37.1"}, Allocatable: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("512Gi"), corev1.ResourcePods: resource.MustParse("110"),
		}},
	}
	f.Nodes = append(f.Nodes, node)
	return node
}

// machine returns facts of a machine. The GPUs of machines differ in their UUIDs only.
func (f *Fleet) machine(name, board string, gpus int, mig bool) *gpu.Node {
	f.tb.Helper()
	facts, err := boards.Load(board)
	if err != nil {
		f.tb.Fatal(err)
	}
	one := facts.GPUs[0]
	facts.GPUs = nil
	for i := range gpus {
		g := one
		bus := 0x1b + 0x0d*i
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", bus)
		g.PCIeRoot = fmt.Sprintf("pci0000:%02x", bus-5)
		g.UUID = uuidOf(name, i)
		g.Minor = i
		if mig && g.MIG != nil {
			m := *g.MIG
			m.Enabled = true
			g.MIG = &m
		}
		facts.GPUs = append(facts.GPUs, g)
	}
	return facts
}

// uuidOf returns a UUID that is always the same for a GPU of a node.
func uuidOf(node string, index int) string {
	var sum uint64 = 14695981039346656037
	for _, b := range []byte(node) {
		sum = (sum ^ uint64(b)) * 1099511628211
	}
	return fmt.Sprintf("GPU-%08x-%04x-%04x-%04x-%012x", sum>>32, sum>>16&0xffff, sum&0xffff, 0x8000+index, index)
}

// Selectors returns CEL selectors.
func Selectors(expressions ...string) []resourceapi.DeviceSelector {
	var out []resourceapi.DeviceSelector
	for _, e := range expressions {
		out = append(out, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: e}})
	}
	return out
}

// Profile is a selector for a profile.
func Profile(name string) string {
	return fmt.Sprintf("device.attributes['%s'].profile == '%s'", Driver, name)
}

// Request asks for one device of a class that all selectors match.
func Request(class string, selectors ...string) resourceapi.DeviceRequest {
	return Count(1, class, selectors...)
}

// Count asks for several devices.
func Count(n int64, class string, selectors ...string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: n, Selectors: Selectors(selectors...),
	}}
}

// Share asks for so much of a shared device: memory, and smPercent if it is not "".
func Share(class, memory, smPercent string) resourceapi.DeviceRequest {
	r := Request(class)
	r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}}
	if smPercent != "" {
		r.Exactly.Capacity.Requests["smPercent"] = resource.MustParse(smPercent)
	}
	return r
}

// Claim adds a claim that waits.
func (f *Fleet) Claim(namespace, name string, requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	f.uid++
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: name, UID: types.UID(fmt.Sprintf("uid-%d", f.uid)), CreationTimestamp: metav1.NewTime(Start),
	}}
	for i, r := range requests {
		if i > 0 {
			r.Name = fmt.Sprint(r.Name, "-", i)
		}
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, r)
	}
	f.Claims = append(f.Claims, c)
	return c
}

// Held adds a claim that the allocator has allocated on a node, and a pod that uses it.
func (f *Fleet) Held(namespace, name, node string, requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	f.tb.Helper()
	planner := allocation.New(f.Snapshot)
	c := f.Claim(namespace, name, requests...)
	for _, n := range planner.Cluster.Nodes {
		if n.Name != node {
			continue
		}
		a := planner.OnNode(context.Background(), n, []*resourceapi.ResourceClaim{c})
		if a.Verdict != allocation.Fits {
			f.tb.Fatalf("claim %s/%s on node %s: %s: %v", namespace, name, node, a.Verdict, a.Err)
		}
		f.allocate(c, &a.Results[0])
		f.Run(c, node)
		return c
	}
	f.tb.Fatalf("there is no node %s", node)
	return nil
}

// allocate gives a claim what it gets. IDs of shares are always the same.
func (f *Fleet) allocate(c *resourceapi.ResourceClaim, result *resourceapi.AllocationResult) {
	for i := range result.Devices.Results {
		if r := &result.Devices.Results[i]; r.ShareID != nil {
			r.ShareID = new(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", f.uid*100+i)))
		}
	}
	result.AllocationTimestamp = new(metav1.NewTime(Start))
	c.Status.Allocation = result
}

// Run adds a pod that uses a claim on a node.
func (f *Fleet) Run(c *resourceapi.ResourceClaim, node string) *corev1.Pod {
	pod := f.Pod(c.Namespace, c.Name, Uses(c))
	pod.Spec.NodeName, pod.Status.Phase = node, corev1.PodRunning
	c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID})
	return pod
}

// Uses refers to a claim.
func Uses(c *resourceapi.ResourceClaim) corev1.PodResourceClaim {
	return corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &c.Name}
}

// Pod adds a pod that waits.
func (f *Fleet) Pod(namespace, name string, claims ...corev1.PodResourceClaim) *corev1.Pod {
	f.uid++
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID(fmt.Sprintf("uid-%d", f.uid)), CreationTimestamp: metav1.NewTime(Start),
		},
		Spec:   corev1.PodSpec{ResourceClaims: claims, Containers: []corev1.Container{{Name: "main", Image: "main"}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, c := range claims {
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: c.Name})
	}
	f.Pods = append(f.Pods, pod)
	return pod
}
