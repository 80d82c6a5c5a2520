// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package stuck

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// prepareTexts tell what an event about a failed preparation is about: the first that is part of
// the message counts. The texts are the kubelet's and those of the driver's errors.
var prepareTexts = []struct {
	part, remedy string
	kind         Kind
}{
	{"is not registered", "the driver's pod on the node does not run, has just started, or has another kubelet directory than the kubelet: see its log", NotRegistered},
	{"is not allowed to use ResourceClaim", "the claim belongs to other pods: refer to another claim, or make one of a template", NotReserved},
	{"previous pod force-deleted", "a pod of the same name was deleted by force: wait until the kubelet has released its claim", OldClaim},
	{"is being unprepared", "the last pod that used the claim is still being cleaned up: the kubelet tries again within 90 seconds", StillUnprepared},
	{"which this driver does not publish", "another DRA driver with this driver's name was on the node when the claim got its device: delete the pod, and replace the claim if it was not made from a template", ForeignDevice},
	{"and may be using this GPU", "a pod of another DRA driver with this driver's name runs on the GPU: delete it, or the pod that waits to get another GPU", ForeignClaim},
	{"invalid device configuration", "correct the configuration in the claim or the class, and make the claim anew: its spec cannot be changed", InvalidConfig},
	{" of the allocation (", "correct the configuration in the claim or the class, and make the claim anew: its spec cannot be changed", InvalidConfig},
	{"and not running: ", mpsRemedy, MPSNotStarted},
	{"MPS supervisor of this node does not answer", supervisorRemedy, MPSUnavailable},
	{"MPS supervisor does not answer", supervisorRemedy, MPSUnavailable},
	{"start MPS session", mpsRemedy, MPSNotStarted},
	{gpu.ErrDriverNotLoaded.Error(), loadRemedy, NVIDIADriver},
	{nvmlCode(1), loadRemedy, NVIDIADriver},
	{nvmlCode(9), loadRemedy, NVIDIADriver},
	{nvmlCode(12), loadRemedy, NVIDIADriver},
	{gpu.ErrVersionMismatch.Error(), versionRemedy, NVIDIADriver},
	{nvmlCode(18), versionRemedy, NVIDIADriver},
	{gpu.ErrLost.Error(), "restart the node; " + deviceRemedy, GPUFailed},
	{nvmlCode(15), "restart the node; " + deviceRemedy, GPUFailed},
	{gpu.ErrResetRequired.Error(), resetRemedy, GPUFailed},
	{nvmlCode(16), resetRemedy, GPUFailed},
	{"has not returned since", hungRemedy, GPUUnresponsive},
	{"was not made by this driver", "somebody made a partition on this GPU by hand: destroy it with nvidia-smi mig on the node, or keep this GPU out of the policy", ForeignPartition},
	{"overlaps with", "another claim still holds a part of the GPU: the driver tries again; the message names it, or, where it is of another namespace, the log of the driver's pod on the node", DeviceInUse},
	{gpu.ErrNoRoom.Error(), roomRemedy, NoRoom},
	{nvmlCode(23), roomRemedy, NoRoom},
	{gpu.ErrNoPermission.Error(), permissionRemedy, NoPermission},
	{nvmlCode(4), permissionRemedy, NoPermission},
	{nvmlCode(17), permissionRemedy, NoPermission},
	{"held by process", "a program on the node that is no pod uses the GPU: end it", DeviceInUse},
	{"In use by another client", "a process still uses the GPU: nvidia-smi on the node shows which", DeviceInUse},
	{"in use", "a process still uses the GPU: nvidia-smi on the node shows which", DeviceInUse},
	{nvmlCode(10), nvmlRemedy, NVMLFailed},
	{nvmlCode(999), nvmlRemedy, NVMLFailed},
	{"context deadline exceeded", "the driver took longer than the kubelet waits (45 s): see the log of the driver's pod on the node", PrepareTimeout},
	{"timed out", "the driver took longer than the kubelet waits (45 s): see the log of the driver's pod on the node", PrepareTimeout},
}

// What can be done where several texts mean the same.
const (
	loadRemedy       = "load the NVIDIA driver on the node, or restart the node"
	versionRemedy    = "the NVIDIA driver was updated under the driver's pod: restart the node"
	resetRemedy      = "delete the pods that use the GPU, then nvidia-smi --gpu-reset on the node, or restart it"
	roomRemedy       = "something that the driver does not know takes room on the GPU: nvidia-smi on the node shows it"
	permissionRemedy = "the driver's pod may not do this on the node: see its securityContext, and whether a policy changes it"
	supervisorRemedy = "look at the pod with label " + fleet.ComponentLabel + "=" + fleet.SupervisorComponent + " on the node"
	nvmlRemedy       = "the NVIDIA driver does not say why, and it is tried again by itself; if it lasts, look for NVRM in the kernel log of the node, and reset the GPU " +
		"(docs/how-to/troubleshoot.md#how-to-reset-a-gpu) or restart the node; " + deviceRemedy
	hungRemedy = "a call to the NVIDIA driver hangs, and it goes on by itself when that returns; if it lasts, drain the node and restart it " +
		"(docs/how-to/troubleshoot.md#gpu-does-not-answer); " + deviceRemedy
	mpsRemedy = "the message says why, and it is tried again by itself; if it lasts, read the log of MPS on the node, /run/partage/mps/DEVICE/log, " +
		"and end what else runs MPS on this GPU (docs/concepts/sharing.md#when-something-goes-wrong); " + deviceRemedy
)

// nvmlCode is how the driver writes what a call of NVML has returned.
func nvmlCode(code int) string { return fmt.Sprintf("(NVML code %d)", code) }

// prepare looks at the last event about a preparation. What was before is over.
func (in *Input) prepare() []Cause {
	e := in.last(failedPrepare)
	if e == nil {
		return nil
	}
	c := Cause{Kind: PrepareFailed, Text: prepareText(e.Message), Remedy: in.logRemedy()}
	for _, known := range prepareTexts {
		if strings.Contains(e.Message, known.part) {
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

// prepareText takes what the kubelet puts before the driver's words away.
func prepareText(message string) string {
	for _, prefix := range []string{"Failed to prepare dynamic resources: ", "prepare dynamic resources: "} {
		message = strings.TrimPrefix(message, prefix)
	}
	return "the devices cannot be prepared: " + message
}

// containers looks at why containers wait.
func (in *Input) containers() []Cause {
	var out []Cause
	for _, s := range statuses(in.Pod) {
		if s.State.Waiting == nil {
			continue
		}
		if c := waiting(in.Pod, &s); c.Kind != "" {
			out = append(out, c)
		}
	}
	return out
}

// waiting says why a container waits that has more to say than that others come first.
func waiting(pod *corev1.Pod, s *corev1.ContainerStatus) Cause {
	w := s.State.Waiting
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

// last returns the latest event of a reason about the pod.
func (in *Input) last(reason string) *corev1.Event {
	var latest *corev1.Event
	for i := range in.Events {
		e := &in.Events[i]
		if e.Reason != reason || e.InvolvedObject.UID != "" && e.InvolvedObject.UID != in.Pod.UID {
			continue
		}
		if latest == nil || fleet.LastSeen(e).After(fleet.LastSeen(latest)) {
			latest = e
		}
	}
	return latest
}

func (c Cause) of(e *corev1.Event) Cause {
	c.Times = max(e.Count, 1)
	if e.Series != nil {
		c.Times = e.Series.Count
	}
	c.Last = new(metav1.NewTime(fleet.LastSeen(e)))
	return c
}
