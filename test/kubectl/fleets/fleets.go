// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleets makes up clusters with GPUs: what the driver would publish on nodes of real
// models, claims that have some of it, and pods. It is for tests and pictures of kubectl gpu.
package fleets

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
)

// Driver is the name of the driver of all fleets.
const Driver = "gpu.nvidia.com"

// now is when all fleets are.
var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

// Builder collects objects. The first error stays.
type Builder struct {
	objects     []runtime.Object
	inventories map[string]*device.Inventory
	gpus        map[string][]gpu.GPU
	boards      map[string]*gpu.Node
	err         error
}

// Objects returns what was added.
func (b *Builder) Objects() ([]runtime.Object, error) { return b.objects, b.err }

// Add adds objects as they are.
func (b *Builder) Add(objects ...runtime.Object) { b.objects = append(b.objects, objects...) }

func (b *Builder) fail(format string, args ...any) {
	if b.err == nil {
		b.err = fmt.Errorf(format, args...)
	}
}

// Node adds a node with n GPUs of a board. Conditions and partitions of others are given by the
// index of the GPU.
func (b *Builder) Node(name, board string, n int, status func(address func(gpu int) string) device.Status) {
	facts, err := b.board(board)
	if err != nil {
		b.fail("node %s: %w", name, err)
		return
	}
	node := replicate(facts, n, len(b.gpus))
	inventory, err := device.NewInventory(node, device.Terms{})
	if err != nil {
		b.fail("node %s: %w", name, err)
		return
	}
	if b.inventories == nil {
		b.inventories, b.gpus = map[string]*device.Inventory{}, map[string][]gpu.GPU{}
	}
	b.inventories[name], b.gpus[name] = inventory, node.GPUs
	if status != nil {
		inventory = inventory.With(status(func(i int) string { return node.GPUs[i].PCIAddress }))
		b.inventories[name] = inventory
	}
	b.Add(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("node-" + name), CreationTimestamp: ago(40 * 24 * time.Hour)},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	})
	published := inventory.ResourceSlices(device.Options{
		Driver: Driver, Pool: name, NodeName: name, PartitionableDevices: true, ConsumableCapacity: true,
	})
	for i := range published {
		b.Add(&published[i])
	}
}

func (b *Builder) board(name string) (*gpu.Node, error) {
	if b.boards == nil {
		b.boards = map[string]*gpu.Node{}
	}
	if b.boards[name] != nil {
		return b.boards[name], nil
	}
	board, mig := strings.CutSuffix(name, "-mig")
	facts, err := boards.Load(board)
	if err != nil {
		return nil, err
	}
	if mig {
		facts.GPUs[0].MIG.Enabled = true
	}
	b.boards[name] = facts
	return facts, nil
}

// replicate is a node with n GPUs like the first one of a board.
func replicate(board *gpu.Node, n, number int) *gpu.Node {
	node := *board
	node.GPUs = nil
	for i := range n {
		g := board.GPUs[0]
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", 0x1b+0x0d*i)
		g.UUID = fmt.Sprintf("GPU-5b1a7e00-%04x-4000-8000-%012x", number, i)
		g.Minor = i
		node.GPUs = append(node.GPUs, g)
	}
	return &node
}

// Has is a device that a claim has.
type Has struct {
	Node string
	// GPU is its index on the node, and Device what comes after its name: "", "mig-1g10gb-6",
	// "mps".
	GPU    int
	Device string
	// Memory, such as "10Gi", and SM are what a share of MPS has.
	Memory string
	SM     string
	// Admin is for observers.
	Admin bool
	// NotReady is the reason of the driver's condition, "" if the device is ready.
	NotReady, Message string
}

// Workload adds a claim with devices, and a running pod of the same name that uses it.
func (b *Builder) Workload(namespace, name string, age time.Duration, devices ...Has) {
	b.WorkloadOf(namespace, name, age, true, devices...)
}

// WorkloadOf is like Workload. Without a pod the claim is allocated and nobody uses it.
func (b *Builder) WorkloadOf(namespace, name string, age time.Duration, pod bool, devices ...Has) {
	claim := Claim(namespace, name, "gpu.nvidia.com", age)
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	for i, h := range devices {
		inventory := b.inventories[h.Node]
		if inventory == nil {
			b.fail("claim %s/%s: there is no node %q", namespace, name, h.Node)
			return
		}
		full := device.GPUName(b.gpus[h.Node][h.GPU].PCIAddress)
		if h.Device != "" {
			full += "-" + h.Device
		}
		d, has := inventory.Lookup(full)
		if !has {
			b.fail("claim %s/%s: node %s has no device %q", namespace, name, h.Node, full)
			return
		}
		result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: Driver, Pool: h.Node, Device: full}
		status := resourceapi.AllocatedDeviceStatus{Driver: Driver, Pool: h.Node, Device: full}
		if h.Admin {
			result.AdminAccess = new(true)
		}
		if d.Share != nil {
			id := types.UID(fmt.Sprintf("%s-%s-%d", namespace, name, i))
			result.ShareID, status.ShareID = &id, new(string(id))
			result.ConsumedCapacity = consumed(h)
		}
		condition := metav1.Condition{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Ready", Message: "The device is ready.", LastTransitionTime: ago(age)}
		if h.NotReady != "" {
			condition.Status, condition.Reason, condition.Message = metav1.ConditionFalse, h.NotReady, h.Message
		}
		status.Conditions = []metav1.Condition{condition}
		claim.Spec.Devices.Requests[0].Exactly.DeviceClassName = classes[d.Kind]
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, result)
		claim.Status.Devices = append(claim.Status.Devices, status)
	}
	claim.Spec.Devices.Requests[0].Exactly.Count = int64(len(devices))
	if pod {
		p := Pod(namespace, name, name, age)
		p.Spec.NodeName, p.Status.Phase = devices[0].Node, corev1.PodRunning
		claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: p.Name, UID: p.UID}}
		b.Add(p)
	}
	b.Add(claim)
}

var classes = map[device.Kind]string{
	device.Whole: "gpu.nvidia.com", device.Partition: "mig.nvidia.com", device.MPS: "mps.partage.dev",
	device.TimeSlice: "timeslice.partage.dev", device.Observer: "observer.partage.dev",
}

func consumed(h Has) map[resourceapi.QualifiedName]resource.Quantity {
	amounts := map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")}
	if h.Memory != "" {
		amounts["memory"] = resource.MustParse(h.Memory)
	}
	if h.SM != "" {
		amounts["smPercent"] = resource.MustParse(h.SM)
	}
	return amounts
}

// Waiting adds a claim without devices and a pod that the scheduler has found no node for.
func (b *Builder) Waiting(namespace, name, class string, age time.Duration, message string, selectors ...string) {
	claim := Claim(namespace, name, class, age)
	for _, s := range selectors {
		r := claim.Spec.Devices.Requests[0].Exactly
		r.Selectors = append(r.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
	}
	pod := Pod(namespace, name, name, age)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message}}
	b.Add(claim, pod)
}

// Classes adds the classes of the chart.
func (b *Builder) Classes() {
	for kind, name := range classes {
		b.Add(&resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: fmt.Sprintf("device.driver == '%s' && device.attributes['%s'].type == '%s'", Driver, Driver, kind),
			}}}},
		})
	}
}

// Claim returns a claim with one request and no devices.
func Claim(namespace, name, class string, age time.Duration) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("claim-" + namespace + "-" + name), CreationTimestamp: ago(age)},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}
}

// Pod returns a pod that wants a claim and has no node.
func Pod(namespace, name, claim string, age time.Duration) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("pod-" + namespace + "-" + name), CreationTimestamp: ago(age)},
		Spec: corev1.PodSpec{
			Containers:     []corev1.Container{{Name: "main", Image: "registry.example.com/app", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}}},
			ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
}

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }
