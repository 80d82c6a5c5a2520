// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// creating is a cause for which a pod stays in ContainerCreating.
type creating struct {
	name string
	// event is what the kubelet says about the preparation, waiting why the container waits.
	event, eventReason string
	waiting            *corev1.ContainerStateWaiting
	change             func(f *fleettest.Fleet, pod *corev1.Pod, claim *resourceapi.ResourceClaim)
	want               []stuck.Kind
}

func prepare(message string) string {
	return "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for ResourceClaim llm: " + message
}

func pluginPod(f *fleettest.Fleet) *corev1.Pod {
	for _, p := range f.Pods {
		if p.Name == "partage-plugin-n1" {
			return p
		}
	}
	return nil
}

var creatings = []creating{
	{name: "driver not registered", event: "Failed to prepare dynamic resources: prepare dynamic resources: DRA driver gpu.nvidia.com is not registered", want: []stuck.Kind{stuck.NotRegistered}},
	{name: "driver pod absent", change: func(f *fleettest.Fleet, _ *corev1.Pod, _ *resourceapi.ResourceClaim) {
		pluginPod(f).Spec.NodeName = "n2"
	}, want: []stuck.Kind{stuck.DriverAbsent}},
	{name: "driver pod not ready", change: func(f *fleettest.Fleet, _ *corev1.Pod, _ *resourceapi.ResourceClaim) {
		pluginPod(f).Status.Conditions = nil
	}, want: []stuck.Kind{stuck.DriverNotReady}},
	{name: "driver pod crashes", event: "Failed to prepare dynamic resources: DRA driver gpu.nvidia.com is not registered", change: func(f *fleettest.Fleet, _ *corev1.Pod, _ *resourceapi.ResourceClaim) {
		pluginPod(f).Status.Conditions = nil
		pluginPod(f).Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "plugin", RestartCount: 7, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Message: "load libnvidia-ml.so.1: NVIDIA driver is not loaded"}},
		}}
	}, want: []stuck.Kind{stuck.DriverCrashes, stuck.NotRegistered}},
	{name: "node not ready", change: func(f *fleettest.Fleet, _ *corev1.Pod, _ *resourceapi.ResourceClaim) {
		f.Nodes[0].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Message: "Kubelet stopped posting node status."}}
	}, want: []stuck.Kind{stuck.NodeNotReady}},
	{name: "configuration invalid", event: prepare(`claim team/llm: invalid device configuration: sharing.mps.threads: unknown field`), want: []stuck.Kind{stuck.InvalidConfig}},
	{name: "field unknown", event: prepare("claim team/llm: configuration 0 of the allocation (of the claim): invalid MigDeviceConfig: sharring: Invalid value: unknown field, known here: apiVersion, kind, sharing"), want: []stuck.Kind{stuck.InvalidConfig}},
	{name: "MPS supervisor has no socket", event: prepare("claim team/llm: tried 6 times: device gpu-0000-b1-00-0-mps: list MPS sessions: the MPS supervisor does not answer on /run/partage/mps/supervisor.sock: connection error"), want: []stuck.Kind{stuck.MPSUnavailable}},
	{name: "in use by a program of the node", event: prepare("turn MIG mode on: nvmlDeviceSetMigMode (activation) on GPU 0000:c3:00.0: In use by another client (NVML code 19), held by process 10000"), want: []stuck.Kind{stuck.DeviceInUse}},
	{name: "NVIDIA driver not loaded", event: prepare("gpu-0000-1b-00-0: NVIDIA driver is not loaded"), want: []stuck.Kind{stuck.NVIDIADriver}},
	{name: "NVIDIA driver updated", event: prepare("initialize NVML: library and kernel driver differ in version"), want: []stuck.Kind{stuck.NVIDIADriver}},
	{name: "GPU lost", event: prepare("gpu-0000-1b-00-0: GPU is lost"), want: []stuck.Kind{stuck.GPUFailed}},
	{name: "GPU needs a reset", event: prepare("gpu-0000-1b-00-0: GPU requires a reset"), want: []stuck.Kind{stuck.GPUFailed}},
	{name: "MPS supervisor", event: prepare("start MPS: the MPS supervisor of this node does not answer"), want: []stuck.Kind{stuck.MPSUnavailable}},
	{name: "MPS does not start", event: prepare("claim team/llm: tried 6 times: device gpu-0000-1b-00-0-mps: MPS session gpu-0000-1b-00-0 is failed and not running: start the control daemon: exit code 1"), want: []stuck.Kind{stuck.MPSNotStarted}},
	{name: "NVML fails", event: prepare("claim team/llm: nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0000:1b:00.0: Unknown Error (NVML code 999)"), want: []stuck.Kind{stuck.NVMLFailed}},
	{name: "NVML hangs", event: prepare("claim team/llm: nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0000:1b:00.0 has not returned since 10:00:00"), want: []stuck.Kind{stuck.GPUUnresponsive}},
	{name: "foreign partition", event: prepare("gpu-0000-1b-00-0 has GPU instance 3: it was not made by this driver and is left alone"), want: []stuck.Kind{stuck.ForeignPartition}},
	{name: "overlap", event: prepare("device gpu-0000-1b-00-0 overlaps with gpu-0000-1b-00-0-mig-1g10gb-6, which is prepared for claim other/b"), want: []stuck.Kind{stuck.DeviceInUse}},
	{name: "in use by a process", event: prepare("turn MIG mode on: in use"), want: []stuck.Kind{stuck.DeviceInUse}},
	{name: "no room", event: prepare("create GPU instance: insufficient resources"), want: []stuck.Kind{stuck.NoRoom}},
	{name: "no permission", event: prepare("create GPU instance: no permission"), want: []stuck.Kind{stuck.NoPermission}},
	{name: "preparation too slow", event: "Failed to prepare dynamic resources: NodePrepareResources: rpc error: code = DeadlineExceeded desc = context deadline exceeded", want: []stuck.Kind{stuck.PrepareTimeout}},
	{name: "claim not reserved", event: "Failed to prepare dynamic resources: pod llm (uid) is not allowed to use ResourceClaim llm (uid)", want: []stuck.Kind{stuck.NotReserved}},
	{name: "claim of a pod deleted by force", event: "Failed to prepare dynamic resources: old ResourceClaim with same name llm and different UID x still exists (previous pod force-deleted?!)", want: []stuck.Kind{stuck.OldClaim}},
	{name: "claim being released", event: "Failed to prepare dynamic resources: ResourceClaim llm is being unprepared", want: []stuck.Kind{stuck.StillUnprepared}},
	{name: "another failure", event: prepare("something new"), want: []stuck.Kind{stuck.PrepareFailed}},
	{name: "device not ready", change: func(_ *fleettest.Fleet, _ *corev1.Pod, c *resourceapi.ResourceClaim) {
		r := c.Status.Allocation.Devices.Results[0]
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: r.Driver, Pool: r.Pool, Device: r.Device, Conditions: []metav1.Condition{{
			Type: "Ready", Status: metav1.ConditionFalse, Reason: "XID", Message: "XID 79: GPU has fallen off the bus", LastTransitionTime: metav1.NewTime(now),
		}}}}
	}, want: []stuck.Kind{stuck.DeviceNotReady}},
	{name: "image", waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: `Back-off pulling image "main:typo"`}, want: []stuck.Kind{stuck.ImagePull}},
	{name: "secret missing", waiting: &corev1.ContainerStateWaiting{Reason: "CreateContainerConfigError", Message: `secret "token" not found`}, want: []stuck.Kind{stuck.ContainerConfig}},
	{name: "CDI unknown", waiting: &corev1.ContainerStateWaiting{Reason: "CreateContainerError", Message: "CDI device injection failed: unresolvable CDI devices gpu.nvidia.com/claim=x"}, want: []stuck.Kind{stuck.CDIUnknown}},
	{name: "container cannot be created", waiting: &corev1.ContainerStateWaiting{Reason: "RunContainerError", Message: "exec: \"serve\": executable file not found in $PATH"}, want: []stuck.Kind{stuck.ContainerCreate}},
	{name: "volume", eventReason: "FailedMount", event: `MountVolume.SetUp failed for volume "models" : configmap "models" not found`, want: []stuck.Kind{stuck.Volume}},
	{name: "runtime class", eventReason: "FailedCreatePodSandBox", event: `Failed to create pod sandbox: no runtime for "nvidia" is configured`, want: []stuck.Kind{stuck.RuntimeClassAbsent}},
	{name: "sandbox", eventReason: "FailedCreatePodSandBox", event: "Failed to create pod sandbox: plugin type=\"calico\" failed", want: []stuck.Kind{stuck.Sandbox}},
	{name: "terminating", change: func(_ *fleettest.Fleet, pod *corev1.Pod, _ *resourceapi.ResourceClaim) {
		pod.DeletionTimestamp = new(metav1.NewTime(now))
	}, want: []stuck.Kind{stuck.Terminating}},
	{name: "user namespace", change: func(_ *fleettest.Fleet, pod *corev1.Pod, c *resourceapi.ResourceClaim) {
		pod.Spec.HostUsers, c.Status.Allocation.Devices.Results[0].Device = new(false), "gpu-0000-1b-00-0-mps"
	}, waiting: &corev1.ContainerStateWaiting{Reason: "RunContainerError", Message: "error during container init: mount"}, want: []stuck.Kind{stuck.UserNamespace, stuck.ContainerCreate}},
	{name: "nothing is said", want: []stuck.Kind{stuck.NothingSaid}},
}

// TestContainerCreating: the right cause is named, with a remedy.
func TestContainerCreating(t *testing.T) {
	for _, c := range creatings {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 1)
			f.AddNode("n2", "h100-80-sxm", 1)
			claim := f.Held("team", "llm", "n1", fleettest.Request(whole))
			pod := f.Pods[len(f.Pods)-1]
			pod.Status.Phase = corev1.PodPending
			if c.waiting != nil {
				pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Image: "main:typo", State: corev1.ContainerState{Waiting: c.waiting}}}
			}
			plugin := f.Pod("partage", "partage-plugin-n1")
			plugin.Labels = map[string]string{"app.kubernetes.io/component": "gpu-kubelet-plugin"}
			plugin.Spec.Volumes = []corev1.Volume{{Name: "dev", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/dev"}}}}
			plugin.Spec.NodeName, plugin.Status.Phase = "n1", corev1.PodRunning
			plugin.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
			if c.change != nil {
				c.change(f, pod, claim)
			}
			x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
			x.Events = func(*corev1.Pod, []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
				if c.event == "" {
					return nil, nil
				}
				reason := c.eventReason
				if reason == "" {
					reason = "FailedPrepareDynamicResources"
				}
				before := corev1.Event{Reason: reason, Message: "something that is over", Count: 1, LastTimestamp: metav1.NewTime(fleettest.Start)}
				return []corev1.Event{{Reason: reason, Message: c.event, Count: 3, LastTimestamp: metav1.NewTime(now)}, before}, nil
			}
			e := x.Pod(t.Context(), pod)
			var kinds []stuck.Kind
			for _, s := range e.Stuck {
				kinds = append(kinds, s.Kind)
				if s.Remedy == "" {
					t.Errorf("%s has no remedy", s.Kind)
				}
			}
			if diff := cmp.Diff(c.want, kinds); diff != "" || e.Verdict != IsStuck || !e.Found() {
				t.Errorf("%s, causes -want +got:\n%s", e.Verdict, diff)
			}
			golden(t, "creating/"+strings.ReplaceAll(c.name, " ", "-")+".txt", printed(t, e))
		})
	}
	if len(creatings) < 25 {
		t.Errorf("%d causes", len(creatings))
	}
}

// TestNotEnding: a pod that should have ended is stuck, whatever the status of its claim says, and -A names it.
func TestNotEnding(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	claim := f.Held("team", "llm", "n1", fleettest.Request(whole))
	r := claim.Status.Allocation.Devices.Results[0]
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: r.Driver, Pool: r.Pool, Device: r.Device,
		Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Message: "The device is ready."}},
	}}
	pod := f.Pods[0]
	pod.DeletionTimestamp = new(metav1.NewTime(now))
	f.Slices = nil
	after := func(d time.Duration) *Explainer { return New(fleet.New(f.Snapshot, fleettest.Driver), now.Add(d)) }
	all := after(5*time.Minute).Waiting(t.Context(), "")
	if len(all) != 1 || all[0].Verdict != IsStuck {
		t.Fatalf("%+v", all)
	}
	golden(t, "stuck/not-ending.txt", printed(t, all...))
	e := after(time.Second).Pod(t.Context(), pod)
	if e.Verdict != Allocated || !strings.Contains(text(t, e), "is being deleted, and keeps what devices it has") {
		t.Errorf("%+v", e)
	}
}

// TestMPSServerLost: a container that started before its MPS server was lost may not have noticed.
func TestMPSServerLost(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team", "llm", "n1", fleettest.Share(mps, "10Gi", ""))
	pod, lost := f.Pods[0], now.Add(-10*time.Minute)
	x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
	x.Events = func(*corev1.Pod, []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
		return []corev1.Event{
			{Reason: "MPSServerLost", Message: "an earlier one", LastTimestamp: metav1.NewTime(lost.Add(-time.Minute))},
			{Reason: "MPSServerLost", Message: "Device a: delete their pods.", LastTimestamp: metav1.NewTime(lost)},
			{Reason: "Other", Message: "other", LastTimestamp: metav1.NewTime(now)},
		}, nil
	}
	for started, want := range map[time.Duration]bool{-time.Hour: true, time.Minute: false} {
		runs := &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(lost.Add(started))}
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Running: runs}}}
		e := x.Pod(t.Context(), pod)
		has := strings.Contains(text(t, e), "Event MPSServerLost, 10m ago: Device a: delete their pods.")
		if has != want || e.Verdict != Allocated || len(e.Notes) > 1 {
			t.Errorf("started %s after the loss: %+v", started, e)
		}
	}
}

// TestEventsUnreadable: without the right to read events that is said.
func TestEventsUnreadable(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team", "llm", "n1", fleettest.Request(whole))
	pod := f.Pods[0]
	pod.Status.Phase = corev1.PodPending
	x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
	x.Events = func(*corev1.Pod, []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
		return nil, errors.New("list events in namespace team: forbidden")
	}
	if got := text(t, x.Pod(t.Context(), pod)); !strings.Contains(got, "Events cannot be read: list events in namespace team: forbidden") {
		t.Error(got)
	}
}
