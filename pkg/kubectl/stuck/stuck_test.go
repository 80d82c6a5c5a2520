// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package stuck

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/mps"
)

// TestWaits: a pod whose init container runs is not stuck.
func TestWaits(t *testing.T) {
	waiting := func(reason string) corev1.ContainerStatus {
		return corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}
	}
	running := corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	for name, c := range map[string]struct {
		phase      corev1.PodPhase
		init, main corev1.ContainerStatus
		want       bool
	}{
		"creating":          {corev1.PodPending, waiting("PodInitializing"), waiting("ContainerCreating"), true},
		"initializing":      {corev1.PodPending, running, waiting("PodInitializing"), false},
		"image of the init": {corev1.PodPending, waiting("ImagePullBackOff"), waiting("PodInitializing"), true},
		"running":           {corev1.PodRunning, running, running, false},
		"crashing":          {corev1.PodRunning, running, waiting("CrashLoopBackOff"), true},
		"over":              {corev1.PodFailed, running, waiting("CrashLoopBackOff"), false},
	} {
		pod := &corev1.Pod{
			Spec:   corev1.PodSpec{NodeName: "n1"},
			Status: corev1.PodStatus{Phase: c.phase, InitContainerStatuses: []corev1.ContainerStatus{c.init}, ContainerStatuses: []corev1.ContainerStatus{c.main}},
		}
		if got := Waits(pod, time.Now()); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestStarting: a pod is starting for a while after each of its steps.
func TestStarting(t *testing.T) {
	now := time.Now()
	at := func(ago time.Duration) metav1.Time { return metav1.NewTime(now.Add(-ago)) }
	scheduled := func(ago time.Duration) *corev1.Pod {
		return &corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: at(ago)},
			{Type: corev1.PodReady, Status: corev1.ConditionFalse, LastTransitionTime: at(0)},
		}}}
	}
	ended := scheduled(time.Hour)
	ended.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{FinishedAt: at(time.Second)}}}}
	deleted := scheduled(time.Second)
	deleted.DeletionTimestamp = new(at(0))
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"a second": {scheduled(time.Second), true}, "two minutes": {scheduled(2 * time.Minute), false}, "an init container has ended": {ended, true},
		"being deleted": {deleted, false}, "nothing is known": {&corev1.Pod{}, false},
	} {
		if got := Starting(c.pod, now); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// unread is a cluster of which nothing is known.
var unread = fleet.New(&fleet.Snapshot{Missing: []fleet.Missing{{Resource: fleet.ResourcePods}}}, "gpu.nvidia.com")

// TestBeingDeleted: a pod may take its time to end, and the time that Kubernetes tells is the one at which that is over.
func TestBeingDeleted(t *testing.T) {
	asked := time.Date(2026, 11, 23, 23, 0, 8, 0, time.UTC)
	pod := &corev1.Pod{Spec: corev1.PodSpec{NodeName: "n1"}, Status: corev1.PodStatus{Phase: corev1.PodPending}}
	pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = new(metav1.NewTime(asked.Add(30*time.Second))), new(int64(30))
	if Waits(pod, asked.Add(10*time.Second)) || !Waits(pod, asked.Add(40*time.Second)) {
		t.Error("it is stuck once its time is over, and not before")
	}
	if got := Causes(Input{Model: unread, Pod: pod})[0]; got.Kind != Terminating || !strings.HasSuffix(got.Text, "since 2026-11-23 23:00:08Z") {
		t.Errorf("%+v", got)
	}
	// Its containers run, as far as the kubelet says, until their devices are released.
	pod.Status.Phase = corev1.PodRunning
	runs := &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(asked)}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: runs}}}
	if Waits(pod, asked.Add(40*time.Second)) || !Waits(pod, asked.Add(2*time.Minute)) {
		t.Error("one that ran is stuck once the time to release its devices is over, and not before")
	}
	over := corev1.Event{Reason: failedPrepare, LastTimestamp: metav1.NewTime(asked.Add(-time.Second))}
	if got := Causes(Input{Model: unread, Pod: pod, Events: []corev1.Event{over}}); len(got) != 1 {
		t.Errorf("what was before a container started is over: %+v", got)
	}
}

// TestDriverErrors: what the driver says today is recognised. The texts are its own.
func TestDriverErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		want Kind
	}{
		{&api.InvalidError{}, InvalidConfig},
		{gpu.ErrDriverNotLoaded, NVIDIADriver},
		{gpu.ErrVersionMismatch, NVIDIADriver},
		{gpu.ErrLost, GPUFailed},
		{gpu.ErrResetRequired, GPUFailed},
		{gpu.ErrInUse, DeviceInUse},
		{gpu.ErrNoRoom, NoRoom},
		{gpu.ErrNoPermission, NoPermission},
		{gpu.ErrTimeout, PrepareTimeout},
		{sharing.ErrNoSupervisor, MPSUnavailable},
		{partition.ErrForeign, ForeignPartition},
		{&rules.Verdict{Why: "device a overlaps with b, which is prepared for claim x"}, DeviceInUse},
		{nvmlError("Uninitialized (NVML code 1)"), NVIDIADriver},
		{nvmlError("Insufficient Permissions (NVML code 4)"), NoPermission},
		{nvmlError("Driver Not Loaded (NVML code 9)"), NVIDIADriver},
		{nvmlError("Timeout (NVML code 10)"), NVMLFailed},
		{nvmlError("NVML Shared Library Not Found (NVML code 12)"), NVIDIADriver},
		{nvmlError("GPU is lost (NVML code 15)"), GPUFailed},
		{nvmlError("GPU requires reset (NVML code 16)"), GPUFailed},
		{nvmlError("GPU access blocked by the operating system (NVML code 17)"), NoPermission},
		{nvmlError("Driver/library version mismatch (NVML code 18)"), NVIDIADriver},
		{nvmlError("In use by another client (NVML code 19)"), DeviceInUse},
		{nvmlError("Insufficient Resources (NVML code 23)"), NoRoom},
		{nvmlError("Unknown Error (NVML code 999)"), NVMLFailed},
		{&gpu.PendingError{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", PCIAddress: "0000:1b:00.0"}, GPUUnresponsive},
		{fmt.Errorf("MPS session gpu-0000-b1-00-0 is %s and not %s: start the control daemon: exit code 1", mps.Failed, mps.Running), MPSNotStarted},
		{errors.New("start MPS session gpu-0000-ca-00-0 on GPU-669e: the control daemon does not answer: context deadline exceeded"), MPSNotStarted},
		{errors.New("claim default/late: the claim has device gpu-0 of another driver with this driver's name, such as NVIDIA's DRA driver, which this driver does not publish; " +
			"the scheduler does not change a claim that has a device, so delete the pod"), ForeignDevice},
		{errors.New("claim default/x: device gpu-0000-1b-00-0: claim ml/train (pod train-0) has device gpu-0 of another driver with this driver's name, " +
			"such as NVIDIA's DRA driver, and may be using this GPU. The pod can start when the pods of that claim have ended"), ForeignClaim},
		{errors.New("something new"), PrepareFailed},
	} {
		in := Input{
			Model:  unread,
			Pod:    &corev1.Pod{Spec: corev1.PodSpec{NodeName: "n1"}},
			Events: []corev1.Event{{Reason: failedPrepare, Message: "Failed to prepare dynamic resources: NodePrepareResources failed for ResourceClaim x: " + c.err.Error()}},
		}
		if got := Causes(in); len(got) != 1 || got[0].Kind != c.want || got[0].Remedy == "" {
			t.Errorf("%v: %+v, want %s", c.err, got, c.want)
		}
	}
}

// nvmlError is one of a call of NVML, which has NVML's words and not those of package gpu.
func nvmlError(text string) error {
	return &gpu.Error{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", PCIAddress: "0000:1b:00.0", Text: text}
}
