// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
)

const (
	driver  = options.DefaultDriver
	install = "partage"
)

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

// world is a cluster. newWorld makes one in which everything is in order.
type world struct {
	version    string
	nodes      []*corev1.Node
	sets       []*appsv1.DaemonSet
	pods       []*corev1.Pod
	slices     []*resourceapi.ResourceSlice
	classes    []*resourceapi.DeviceClass
	claims     []*resourceapi.ResourceClaim
	templates  []*resourceapi.ResourceClaimTemplate
	rules      []*resourceapi.DeviceTaintRule
	configs    []*corev1.ConfigMap
	events     []*corev1.Event
	forbidden  map[string]bool // "resource" in all namespaces, "namespace/resource" in one
	namespaced string
}

// newWorld has the GPU nodes gpu-1 and gpu-2 with two H100 each, of which the pod train-0 has
// one partition, and the node cpu-1.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{version: "v1.37.1", forbidden: map[string]bool{}}
	for _, name := range []string{"cpu-1", "gpu-1", "gpu-2"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}, Status: corev1.NodeStatus{
			NodeInfo:    corev1.NodeSystemInfo{KubeletVersion: "v1.37.1", ContainerRuntimeVersion: "containerd://2.1.0"},
			Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8")},
		}}
		w.nodes = append(w.nodes, n)
		for _, component := range []string{pluginLabel, supervisor} {
			w.pods = append(w.pods, w.driverPod(component, name))
		}
		if name == "cpu-1" {
			continue
		}
		n.Labels["feature.node.kubernetes.io/pci-10de.present"] = "true"
		n.Labels["nvidia.com/gpu.count"] = "2"
		w.slices = append(w.slices, published(t, name)...)
	}
	for _, component := range []string{pluginLabel, supervisor} {
		set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: install, Name: "partage-" + component, Labels: map[string]string{componentLabel: component}}}
		set.Status.DesiredNumberScheduled = 3
		w.sets = append(w.sets, set)
	}
	w.set(pluginLabel).Spec.Template.Spec.Volumes = []corev1.Volume{{Name: policyVolume, VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "partage-sharing-policy"}},
	}}}
	w.configs = []*corev1.ConfigMap{{ObjectMeta: metav1.ObjectMeta{Namespace: install, Name: "partage-sharing-policy"}, Data: map[string]string{
		policyKey: "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n",
	}}}
	for _, c := range chartClasses {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: c.name}}
		if c.name == fleet.MainClass {
			class.Annotations = map[string]string{fleet.NamespaceAnnotation: install}
		}
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == '%s' && device.attributes['%s'].type == '%s'", driver, driver, c.deviceType),
		}}}
		w.classes = append(w.classes, class)
	}
	for _, of := range []string{"gpu", "timeslice"} {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: of + ".resource.partage.dev"}}
		class.Spec.ExtendedResourceName = new(map[string]string{"gpu": "nvidia.com/gpu", "timeslice": "nvidia.com/gpu.shared"}[of])
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == '%[1]s' && device.attributes['%[1]s'].type == '%[2]s' && has(device.attributes['%[1]s'].extendedResources)", driver, of),
		}}}
		w.classes = append(w.classes, class)
	}

	w.pods = append(w.pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train-0", UID: "train-0"}, Spec: corev1.PodSpec{NodeName: "gpu-1"}})
	w.templates = []*resourceapi.ResourceClaimTemplate{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train"}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: asks("mig.nvidia.com")}}}
	w.claims = []*resourceapi.ResourceClaim{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train-0-gpu", Finalizers: []string{"resource.kubernetes.io/delete-protection"}},
		Spec:       asks("mig.nvidia.com"),
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "gpu", Driver: driver, Pool: "gpu-1", Device: "gpu-0000-1b-00-0-mig-1g10gb-6"},
			}}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "train-0", UID: "train-0"}},
		},
	}}
	return w
}

func asks(class string) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
		{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class}},
	}}}
}

// published is what the driver publishes on a node with two H100.
func published(t *testing.T, node string) []*resourceapi.ResourceSlice {
	t.Helper()
	facts, err := boards.Load("h100")
	if err != nil {
		t.Fatal(err)
	}
	second := facts.GPUs[0]
	second.PCIAddress, second.UUID = "0000:43:00.0", "GPU-5b1a7e00-0000-4000-8000-000000000001"
	facts.GPUs = append(facts.GPUs, second)
	inventory, err := device.NewInventory(facts, device.Terms{ExtendedResources: true})
	if err != nil {
		t.Fatal(err)
	}
	var all []*resourceapi.ResourceSlice
	for _, s := range inventory.ResourceSlices(device.Options{Driver: driver, Pool: node, NodeName: node, PartitionableDevices: true, ConsumableCapacity: true}) {
		all = append(all, &s)
	}
	return all
}

// ofHost is a folder of the node.
var ofHost = []corev1.Volume{{Name: "dev", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/dev"}}}}

func (w *world) driverPod(component, node string) *corev1.Pod {
	name := component + "-" + node
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: install, Name: name, UID: types.UID(name), Labels: map[string]string{componentLabel: component}, CreationTimestamp: ago(24 * time.Hour),
			OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "partage-" + component, Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "plugin"}}, Volumes: ofHost},
		Status: corev1.PodStatus{
			Phase:             corev1.PodRunning,
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "plugin", Image: "registry.example.com/partage:dev"}},
		},
	}
}

func find[T any](all []T, match func(T) bool) T { return all[slices.IndexFunc(all, match)] }

func named[T metav1.Object](all []T, name string) T {
	return find(all, func(o T) bool { return o.GetName() == name })
}

func (w *world) node(name string) *corev1.Node { return named(w.nodes, name) }

func (w *world) plugin(node string) *corev1.Pod { return named(w.pods, pluginLabel+"-"+node) }

func (w *world) supervisor(node string) *corev1.Pod { return named(w.pods, supervisor+"-"+node) }

func (w *world) set(component string) *appsv1.DaemonSet { return named(w.sets, "partage-"+component) }

func (w *world) class(name string) *resourceapi.DeviceClass { return named(w.classes, name) }

// wait makes a pod that is on no node.
func (w *world) wait(name string, claim corev1.PodResourceClaim) {
	w.pods = append(w.pods, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)}, Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{claim}},
	})
}

func (w *world) withoutPod(pod *corev1.Pod) {
	w.pods = slices.DeleteFunc(w.pods, func(p *corev1.Pod) bool { return p == pod })
}

func (w *world) withoutSlices(node string) {
	w.slices = slices.DeleteFunc(w.slices, func(s *resourceapi.ResourceSlice) bool { return *s.Spec.NodeName == node })
}

// device returns a device as it is in its slice.
func (w *world) device(node, name string) *resourceapi.Device {
	for _, s := range w.slices {
		for i := range s.Spec.Devices {
			if *s.Spec.NodeName == node && s.Spec.Devices[i].Name == name {
				return &s.Spec.Devices[i]
			}
		}
	}
	panic("no device " + name)
}

// taint taints all devices of a GPU but the observer, as the driver does.
func (w *world) taint(node, gpu, name, value string, effect resourceapi.DeviceTaintEffect) {
	for _, s := range w.slices {
		for i := range s.Spec.Devices {
			if d := &s.Spec.Devices[i]; *s.Spec.NodeName == node && strings.HasPrefix(d.Name, "gpu-"+gpu) && !strings.HasSuffix(d.Name, "-observer") {
				d.Taints = append(d.Taints, resourceapi.DeviceTaint{Key: driver + "/" + name, Value: value, Effect: effect, TimeAdded: new(ago(40 * time.Second))})
			}
		}
	}
}

// waits makes a pod not ready, for a reason of its container.
func waits(p *corev1.Pod, reason, message string) {
	p.Status.Conditions[0].Status = corev1.ConditionFalse
	if reason != "" {
		p.Status.ContainerStatuses[0].State.Waiting = &corev1.ContainerStateWaiting{Reason: reason, Message: message}
	}
}

func (w *world) event(kind, name, component, eventType, reason, message string, before time.Duration) *corev1.Event {
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("event-%d", len(w.events))},
		InvolvedObject: corev1.ObjectReference{Kind: kind, Name: name, UID: types.UID(name)}, Source: corev1.EventSource{Component: component},
		Type: eventType, Reason: reason, Message: message, LastTimestamp: ago(before),
	}
	w.events = append(w.events, e)
	return e
}

func (w *world) client() *fake.Clientset {
	var objects []runtime.Object
	add := func(o runtime.Object) { objects = append(objects, o) }
	each(w.nodes, add)
	each(w.sets, add)
	each(w.pods, add)
	each(w.slices, add)
	each(w.classes, add)
	each(w.claims, add)
	each(w.templates, add)
	each(w.rules, add)
	each(w.configs, add)
	each(w.events, add)
	client := fake.NewClientset(objects...)
	discovery, is := client.Discovery().(*fakediscovery.FakeDiscovery)
	if !is {
		panic("the fake clientset has another discovery")
	}
	discovery.FakedServerVersion = &version.Info{GitVersion: w.version}
	client.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		resource := a.GetResource().Resource
		if !w.forbidden[resource] && !w.forbidden[a.GetNamespace()+"/"+resource] || a.GetNamespace() != "" && !w.forbidden[a.GetNamespace()+"/"+resource] {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: a.GetResource().Group, Resource: resource}, "", fmt.Errorf("no"))
	})
	return client
}

func each[T runtime.Object](all []T, add func(runtime.Object)) {
	for _, o := range all {
		add(o)
	}
}

func (w *world) examine(t *testing.T) *Report {
	t.Helper()
	facts, err := Read(t.Context(), w.client(), driver, w.namespaced, now)
	if err != nil {
		t.Fatal(err)
	}
	return Examine(facts)
}
