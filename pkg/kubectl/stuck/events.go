// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package stuck

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Reasons of the kubelet's events.
const (
	failedPrepare = "FailedPrepareDynamicResources"
	failedMount   = "FailedMount"
	failedAttach  = "FailedAttachVolume"
	failedSandbox = "FailedCreatePodSandBox"
)

// prepareTexts tell what an event about a failed preparation is about: the first that has a part of the message counts. The parts are the
// kubelet's and those of the driver's errors.
var prepareTexts = []struct {
	kind   Kind
	remedy string
	parts  []string
}{
	{NotRegistered, "the driver's pod on the node does not run, has just started, or has another kubelet directory than the kubelet: see its log",
		[]string{"is not registered"}},
	{NotReserved, "the claim belongs to other pods: refer to another claim, or make one of a template", []string{"is not allowed to use ResourceClaim"}},
	{OldClaim, "a pod of the same name was deleted by force: wait until the kubelet has released its claim", []string{"previous pod force-deleted"}},
	{StillUnprepared, "the last pod that used the claim is still being cleaned up: the kubelet tries again within 90 seconds", []string{"is being unprepared"}},
	{ForeignDevice, "another DRA driver with this driver's name was on the node when the claim got its device: delete the pod, " +
		"and replace the claim if it was not made from a template", []string{"which this driver does not publish"}},
	{ForeignClaim, "a pod of another DRA driver with this driver's name runs on the GPU: delete it, or the pod that waits to get another GPU",
		[]string{"and may be using this GPU"}},
	{InvalidConfig, "correct the configuration in the claim or the class, and make the claim anew: its spec cannot be changed",
		[]string{"invalid device configuration", " of the allocation ("}},
	{MPSUnavailable, "look at the pod with label " + fleet.ComponentLabel + "=" + fleet.SupervisorComponent + " on the node",
		[]string{"MPS supervisor of this node does not answer", "MPS supervisor does not answer"}},
	{MPSNotStarted, "the message says why, and it is tried again by itself; if it lasts, read the log of MPS on the node, /run/partage/mps/DEVICE/log, " +
		"and end what else runs MPS on this GPU (docs/concepts/sharing.md#when-something-goes-wrong); " + deviceRemedy,
		[]string{"and not running: ", "start MPS session"}},
	{NVIDIADriver, "load the NVIDIA driver on the node, or restart the node",
		[]string{gpu.ErrDriverNotLoaded.Error(), nvmlCode(1), nvmlCode(9), nvmlCode(12)}},
	{NVIDIADriver, "the NVIDIA driver was updated under the driver's pod: restart the node", []string{gpu.ErrVersionMismatch.Error(), nvmlCode(18)}},
	{GPUFailed, "restart the node; " + deviceRemedy, []string{gpu.ErrLost.Error(), nvmlCode(15)}},
	{GPUFailed, "delete the pods that use the GPU, then nvidia-smi --gpu-reset on the node, or restart it",
		[]string{gpu.ErrResetRequired.Error(), nvmlCode(16)}},
	{GPUUnresponsive, "a call to the NVIDIA driver hangs, and it goes on by itself when that returns; if it lasts, drain the node and restart it " +
		"(docs/how-to/troubleshoot.md#gpu-does-not-answer); " + deviceRemedy, []string{"has not returned since"}},
	{ForeignPartition, "somebody made a partition on this GPU by hand: destroy it with nvidia-smi mig on the node, or keep this GPU out of the policy",
		[]string{"was not made by this driver"}},
	{DeviceInUse, "another claim still holds a part of the GPU: the driver tries again; the message names it, or, where it is of another namespace, " +
		"the log of the driver's pod on the node", []string{"overlaps with"}},
	{NoRoom, "something that the driver does not know takes room on the GPU: nvidia-smi on the node shows it",
		[]string{gpu.ErrNoRoom.Error(), nvmlCode(23)}},
	{NoPermission, "the driver's pod may not do this on the node: see its securityContext, and whether a policy changes it",
		[]string{gpu.ErrNoPermission.Error(), nvmlCode(4), nvmlCode(17)}},
	{DeviceInUse, "a program on the node that is no pod uses the GPU: end it", []string{"held by process"}},
	{DeviceInUse, "a process still uses the GPU: nvidia-smi on the node shows which", []string{"In use by another client", "in use"}},
	{NVMLFailed, "the NVIDIA driver does not say why, and it is tried again by itself; if it lasts, look for NVRM in the kernel log of the node, " +
		"and reset the GPU (docs/how-to/troubleshoot.md#how-to-reset-a-gpu) or restart the node; " + deviceRemedy,
		[]string{nvmlCode(10), nvmlCode(999)}},
	{PrepareTimeout, "the driver took longer than the kubelet waits (45 s): see the log of the driver's pod on the node",
		[]string{"context deadline exceeded", "timed out"}},
}

// nvmlCode is how the driver writes what a call of NVML has returned.
func nvmlCode(code int) string { return fmt.Sprintf("(NVML code %d)", code) }

// prepare looks at the last event about a preparation. What was before is over.
func (in *Input) prepare() []Cause {
	e := in.last(failedPrepare)
	if e == nil {
		return nil
	}
	// What the kubelet puts before the driver's words says no more.
	text := strings.TrimPrefix(strings.TrimPrefix(e.Message, "Failed to prepare dynamic resources: "), "prepare dynamic resources: ")
	c := Cause{Kind: PrepareFailed, Text: "the devices cannot be prepared: " + text, Remedy: in.logRemedy()}
	for _, known := range prepareTexts {
		if slices.ContainsFunc(known.parts, func(part string) bool { return strings.Contains(e.Message, part) }) {
			c.Kind, c.Remedy = known.kind, known.remedy
			break
		}
	}
	return []Cause{c.of(e)}
}

// logRemedy says how to read the log of the driver on the node.
func (in *Input) logRemedy() string {
	text := "see the log of the driver's pod on node " + in.Pod.Spec.NodeName
	if plugins := in.component(fleet.PluginComponent); len(plugins) > 0 {
		text += fmt.Sprintf(": kubectl -n %s logs %s", plugins[0].Namespace, plugins[0].Name)
	}
	return text
}

// containers looks at why containers wait.
func (in *Input) containers() []Cause {
	var out []Cause
	for _, s := range statuses(in.Pod) {
		if c := waiting(in.Pod, &s); c.Kind != "" {
			out = append(out, c)
		}
	}
	return out
}

// waiting says why a container waits that has more to say than that others come first.
func waiting(pod *corev1.Pod, s *corev1.ContainerStatus) Cause {
	w := ptr.Deref(s.State.Waiting, corev1.ContainerStateWaiting{})
	text := func(what string) string {
		return strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", s.Name, what, cmp.Or(w.Message, w.Reason)), ": ")
	}
	switch w.Reason {
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable":
		return Cause{Kind: ImagePull, Text: text("image " + s.Image + " cannot be pulled"), Remedy: "correct the name or the tag of the image, or add imagePullSecrets"}
	case "CreateContainerConfigError":
		return Cause{Kind: ContainerConfig, Text: text("it cannot be configured"), Remedy: "create the ConfigMap or Secret that is named, or correct its name"}
	case "CreateContainerError", "RunContainerError":
		if strings.Contains(w.Message, "CDI") {
			return Cause{
				Kind: CDIUnknown, Text: text("the container runtime does not know its device"),
				Remedy: "turn CDI on in the container runtime, and let it read the directory in which the driver writes (/var/run/cdi)",
			}
		}
		return Cause{Kind: ContainerCreate, Text: text("it cannot be created"), Remedy: "see the message; it is the container runtime's"}
	case "CrashLoopBackOff":
		return Cause{
			Kind: ContainerCrashes, Text: fmt.Sprintf("container %s has its devices and ends again and again (%d restarts)", s.Name, s.RestartCount),
			Remedy: fmt.Sprintf("kubectl -n %s logs %s -c %s --previous", pod.Namespace, pod.Name, s.Name),
		}
	}
	return Cause{}
}

// events looks at what the kubelet says about volumes and the sandbox.
func (in *Input) events() []Cause {
	var out []Cause
	for _, reason := range []string{failedMount, failedAttach} {
		if e := in.last(reason); e != nil {
			c := Cause{Kind: Volume, Text: "a volume is not there: " + e.Message, Remedy: "create the object that is named, or correct spec.volumes"}
			out = append(out, c.of(e))
		}
	}
	if e := in.last(failedSandbox); e != nil {
		c := Cause{Kind: Sandbox, Text: "the pod's sandbox cannot be created: " + e.Message, Remedy: "see whether the network plugin runs on node " + in.Pod.Spec.NodeName}
		if strings.Contains(e.Message, "no runtime for") || strings.Contains(e.Message, "RuntimeHandler") {
			c.Kind, c.Remedy = RuntimeClassAbsent, "take runtimeClassName out of the pod: claims need none; or configure that runtime on the node"
		}
		out = append(out, c.of(e))
	}
	return out
}

// last returns the latest event of a reason about the pod. What was before one of its containers started is over.
func (in *Input) last(reason string) *corev1.Event {
	started := started(in.Pod)
	var latest *corev1.Event
	for i := range in.Events {
		e := &in.Events[i]
		if e.Reason != reason || e.InvolvedObject.UID != "" && e.InvolvedObject.UID != in.Pod.UID || fleet.LastSeen(e).Before(started) {
			continue
		}
		if latest == nil || fleet.LastSeen(e).After(fleet.LastSeen(latest)) {
			latest = e
		}
	}
	return latest
}

// started returns when a container of a pod has started last.
func started(pod *corev1.Pod) (last time.Time) {
	for _, s := range statuses(pod) {
		for _, state := range []corev1.ContainerState{s.LastTerminationState, s.State} {
			at := ptr.Deref(state.Terminated, corev1.ContainerStateTerminated{}).StartedAt.Time
			if state.Running != nil {
				at = state.Running.StartedAt.Time
			}
			if at.After(last) {
				last = at
			}
		}
	}
	return last
}

func (c Cause) of(e *corev1.Event) Cause {
	c.Times = max(e.Count, 1)
	if e.Series != nil {
		c.Times = e.Series.Count
	}
	c.Last = new(metav1.NewTime(fleet.LastSeen(e)))
	return c
}
