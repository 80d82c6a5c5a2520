// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package stuck says why the containers of a pod do not start although it has a node and its
// claims are allocated, or why it does not end: from events, conditions of its claims, and the driver's pods on the node.
package stuck

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Kind is why a pod is stuck, for programs.
type Kind string

// Kinds of causes.
const (
	NodeNotReady       Kind = "NodeNotReady"
	DriverAbsent       Kind = "DriverPodAbsent"
	DriverCrashes      Kind = "DriverPodCrashes"
	DriverNotReady     Kind = "DriverPodNotReady"
	SupervisorDown     Kind = "MPSSupervisorNotReady"
	NotRegistered      Kind = "DriverNotRegistered"
	NotReserved        Kind = "ClaimNotReserved"
	OldClaim           Kind = "OldClaimPrepared"
	StillUnprepared    Kind = "ClaimBeingReleased"
	InvalidConfig      Kind = "InvalidConfiguration"
	NVIDIADriver       Kind = "NVIDIADriverUnusable"
	GPUFailed          Kind = "GPUFailed"
	GPUUnresponsive    Kind = "GPUUnresponsive"
	NVMLFailed         Kind = "NVMLFailed"
	MPSUnavailable     Kind = "MPSUnavailable"
	MPSNotStarted      Kind = "MPSNotStarted"
	ForeignPartition   Kind = "ForeignPartition"
	ForeignDevice      Kind = "DeviceOfOtherDriver"
	ForeignClaim       Kind = "ClaimOfOtherDriver"
	DeviceInUse        Kind = "DeviceInUse"
	NoRoom             Kind = "NoRoomOnGPU"
	NoPermission       Kind = "DriverLacksPermission"
	PrepareTimeout     Kind = "PrepareTimeout"
	PrepareFailed      Kind = "PrepareFailed"
	DeviceNotReady     Kind = "DeviceNotReady"
	ImagePull          Kind = "ImagePull"
	ContainerConfig    Kind = "ContainerConfiguration"
	CDIUnknown         Kind = "CDIDeviceUnknown"
	ContainerCreate    Kind = "ContainerCreation"
	ContainerCrashes   Kind = "ContainerCrashes"
	Volume             Kind = "Volume"
	RuntimeClassAbsent Kind = "RuntimeClassUnknown"
	Sandbox            Kind = "PodSandbox"
	Terminating        Kind = "PodTerminating"
	NotAllocated       Kind = "ClaimNotAllocated"
	UserNamespace      Kind = "UserNamespaceWithMPS"
	SharesTogether     Kind = "SharesInOneContainer"
	NothingSaid        Kind = "NothingSaid"
)

// Input is what is known about a pod that has a node.
type Input struct {
	Model *fleet.Model
	Pod   *corev1.Pod
	// Claims are the pod's, and Events those of both, in any order.
	Claims []*resourceapi.ResourceClaim
	Events []corev1.Event
}

// Cause is why containers do not start, or the pod does not end.
type Cause struct {
	Kind Kind `json:"kind"`
	// Text says what is wrong, and Remedy what can be done about it.
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
	// Times and Last are of the event that tells it, if one does.
	Times int32        `json:"times,omitempty"`
	Last  *metav1.Time `json:"last,omitempty"`
}

// slowestRelease is how long it may take after a pod's containers have ended until its devices are released.
const slowestRelease = 30 * time.Second

// Waits reports whether a pod that has a node has containers that have not started, or is there although it should have ended. While its
// containers may take their time to end, a pod that is being deleted is not stuck.
func Waits(pod *corev1.Pod, now time.Time) bool {
	deleted := pod.DeletionTimestamp
	if deleted != nil && now.Before(deleted.Time) || pod.Spec.NodeName == "" || fleet.Ended(pod) {
		return false
	}
	if slices.ContainsFunc(statuses(pod), waitsForMore) || deleted != nil && now.Sub(deleted.Time) >= slowestRelease {
		return true
	}
	running := func(s corev1.ContainerStatus) bool { return s.State.Running != nil }
	return pod.Status.Phase == corev1.PodPending && !slices.ContainsFunc(statuses(pod), running)
}

// usualStart is how long a pod may take from one step of its start to the next before that means anything.
const usualStart = time.Minute

// Starting reports whether a pod has come a step further lately.
func Starting(pod *corev1.Pod, now time.Time) bool {
	last := started(pod)
	for _, c := range pod.Status.Conditions {
		if c.Status == corev1.ConditionTrue && c.LastTransitionTime.After(last) {
			last = c.LastTransitionTime.Time
		}
	}
	for _, s := range statuses(pod) {
		if t := s.State.Terminated; t != nil && t.FinishedAt.After(last) {
			last = t.FinishedAt.Time
		}
	}
	return pod.DeletionTimestamp == nil && now.Sub(last) < usualStart
}

// waitsForMore reports whether a container waits, and not for the one before it.
func waitsForMore(s corev1.ContainerStatus) bool {
	w := s.State.Waiting
	return w != nil && w.Reason != "PodInitializing" && w.Reason != "ContainerCreating"
}

func statuses(pod *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses)
}

// Causes returns why a pod is stuck, what has to be done first at the beginning.
func Causes(in Input) []Cause {
	var out []Cause
	if in.Pod.DeletionTimestamp != nil {
		// The time is that by which its containers must have ended.
		since := in.Pod.DeletionTimestamp.Add(-time.Duration(ptr.Deref(in.Pod.DeletionGracePeriodSeconds, 0)) * time.Second)
		out = append(out, Cause{
			Kind: Terminating,
			Text: "the pod is being deleted since " + strings.TrimSuffix(since.UTC().Format("2006-01-02 15:04:05Z")+"; "+Ended(in.Pod), "; "),
			Remedy: "it ends when the driver on its node has released the devices; if the driver runs there, see the kubelet's log on the node, " +
				"and what the pod's finalizers wait for",
		})
	}
	for _, find := range []func() []Cause{in.node, in.Unallocated, in.driver, in.prepare, in.devices, in.containers, in.events} {
		out = append(out, find()...)
	}
	if len(out) == 0 {
		return []Cause{{
			Kind: NothingSaid, Text: "neither events, nor conditions of the claims, nor the driver's pods say why",
			Remedy: "wait two minutes: the kubelet tries again every 60 to 90 seconds; if it lasts, look at the kubelet's log on the node",
		}}
	}
	return out
}

// Ended says what ended a pod, or ends it, as far as its status tells, or nothing. A container that has ended deletes no pod.
func Ended(pod *corev1.Pod) string {
	var parts []string
	said := func(words ...string) {
		if words = slices.DeleteFunc(words, func(w string) bool { return w == "" }); len(words) > 0 {
			parts = append(parts, strings.Join(words, ": "))
		}
	}
	if c := fleet.Condition(pod, corev1.DisruptionTarget); c.Status == corev1.ConditionTrue {
		said(c.Reason, c.Message)
	}
	said(pod.Status.Reason, pod.Status.Message)
	for _, s := range statuses(pod) {
		if t := s.State.Terminated; t != nil && t.ExitCode != 0 && fleet.Ended(pod) {
			said(fmt.Sprintf("container %s ended with exit code %d", s.Name, t.ExitCode), t.Reason)
		}
	}
	return strings.Join(parts, "; ")
}

// Unallocated finds claims that have no devices although the pod has a node: nobody allocates them
// for a pod that the scheduler does not look at.
func (in *Input) Unallocated() []Cause {
	var out []Cause
	for _, c := range in.Claims {
		if c.Status.Allocation != nil {
			continue
		}
		out = append(out, Cause{
			Kind: NotAllocated, Text: fmt.Sprintf("claim %s is not allocated: the pod is put on node %s by spec.nodeName, past the scheduler", c.Name, in.Pod.Spec.NodeName),
			Remedy: "make the pod anew without spec.nodeName; nodeSelector kubernetes.io/hostname leads to a node, too",
		})
	}
	return out
}

func (in *Input) node() []Cause {
	node := in.Model.Node(in.Pod.Spec.NodeName)
	for _, c := range ptr.Deref(node, corev1.Node{}).Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return []Cause{{
				Kind: NodeNotReady, Text: fmt.Sprintf("node %s is not ready: %s", node.Name, cmp.Or(c.Message, c.Reason, "no reason is given")),
				Remedy: "restart the kubelet or the node; until then nothing starts there",
			}}
		}
	}
	return nil
}

// driver looks at the driver's pods on the node, if the pod has devices of it.
func (in *Input) driver() []Cause {
	var has []*resourceapi.DeviceRequestAllocationResult
	for _, c := range in.Claims {
		has = append(has, fleet.Results(c, in.Model.Driver)...)
	}
	if len(has) == 0 {
		return nil
	}
	plugins := in.component(fleet.PluginComponent)
	var out []Cause
	switch {
	case len(plugins) == 0 && !in.Model.Hides(fleet.ResourcePods):
		out = append(out, Cause{
			Kind: DriverAbsent, Text: fmt.Sprintf("no pod of driver %s runs on node %s", in.Model.Driver, in.Pod.Spec.NodeName),
			Remedy: "look at the DaemonSet with label " + fleet.ComponentLabel + "=" + fleet.PluginComponent +
				": its node selector and tolerations have to fit the node; " +
				"if there is none, Partage is not installed: docs/how-to/uninstall.md#if-the-uninstallation-fails",
		})
	case len(plugins) > 0 && !slices.ContainsFunc(plugins, fleet.Ready):
		out = append(out, unready(plugins[0], DriverNotReady, "the driver's pod"))
	}
	supervisors := in.component(fleet.SupervisorComponent)
	if len(supervisors) > 0 && !slices.ContainsFunc(supervisors, fleet.Ready) && slices.ContainsFunc(has, fleet.IsMPS) {
		out = append(out, unready(supervisors[0], SupervisorDown, "the MPS supervisor"))
	}
	return out
}

func unready(pod *corev1.Pod, kind Kind, what string) Cause {
	c := Cause{
		Kind: kind, Text: fmt.Sprintf("%s %s/%s on node %s is not ready", what, pod.Namespace, pod.Name, pod.Spec.NodeName),
		Remedy: fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name),
	}
	for _, s := range statuses(pod) {
		if w := s.State.Waiting; w != nil && w.Reason == "CrashLoopBackOff" {
			if kind == DriverNotReady {
				c.Kind = DriverCrashes
			}
			c.Text = fmt.Sprintf("%s %s/%s on node %s crashes: container %s was restarted %d times", what, pod.Namespace, pod.Name, pod.Spec.NodeName, s.Name, s.RestartCount)
			if t := s.LastTerminationState.Terminated; t != nil && t.Message != "" {
				c.Text += ": " + t.Message
			}
			c.Remedy = fmt.Sprintf("kubectl -n %s logs %s -c %s --previous", pod.Namespace, pod.Name, s.Name)
			return c
		} else if w != nil && w.Message != "" {
			c.Text += ": " + w.Message
		}
	}
	return c
}

func (in *Input) component(name string) []*corev1.Pod {
	var out []*corev1.Pod
	// Anybody can give a pod a label.
	for _, p := range in.Model.Pods {
		if fleet.MountsHost(p) && p.Labels[fleet.ComponentLabel] == name && p.Spec.NodeName == in.Pod.Spec.NodeName && p.DeletionTimestamp == nil {
			out = append(out, p)
		}
	}
	return out
}

// devices looks at what the driver says about the devices of the claims.
func (in *Input) devices() []Cause {
	var out []Cause
	for _, c := range in.Claims {
		for _, d := range c.Status.Devices {
			ready := meta.FindStatusCondition(d.Conditions, "Ready")
			if ready == nil || ready.Status != metav1.ConditionFalse {
				continue
			}
			out = append(out, Cause{
				Kind: DeviceNotReady, Text: fmt.Sprintf("device %s of claim %s is not ready: %s: %s", d.Device, c.Name, ready.Reason, ready.Message),
				Remedy: deviceRemedy, Last: &ready.LastTransitionTime,
			})
		}
	}
	return out
}

const deviceRemedy = "if this lasts, delete the pod, and replace the claim if it was not made from a template, to get another device"
