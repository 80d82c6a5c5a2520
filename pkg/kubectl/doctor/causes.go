// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/device"
)

// cause is something that the driver says of a GPU, a node or a claim: with a taint, with events, or with both.
type cause struct {
	// taint is the name part of its key, event the reason of the events.
	taint, event string
	severity     Severity
	// text says what is wrong in a few words, remedy what helps. VALUE is that of the taint.
	text, remedy string
	// broken ones are signs of one fault if a GPU has several: the first in the table has the remedy.
	broken bool
	// pods says that it concerns the pods that use the device, free that they have to be deleted.
	pods, free bool
	// wholeNode ones are of a node, although its GPUs have the taint.
	wholeNode bool
	// claims says that the driver tells claims only, and not the node.
	claims bool
	// command ends it, with the name of the GPU.
	command string
	// over is the event of a node that says that it is over. Taints and claims that are gone say so themselves; what users can write says
	// nothing.
	over string
	// follows says that a fault of the GPU brings it about, and is the cause where it has one.
	follows bool
	// untilRestart says that it is over for pods whose containers have started since.
	untilRestart bool
	// past ones are over when they are told; others are, where they are of a claim that is gone, unless they outlive it.
	past, outlivesClaim bool
	// check is the one that looks at the same in the cluster's objects, so that events say nothing new.
	check string
}

// causes are all that the driver warns of.
var causes = []cause{
	{taint: "gpu-lost", event: "GPULost", severity: Error, text: "lost", broken: true, pods: true, free: true, remedy: "Drain the node and restart it. If it happens again, have the GPU looked at"},
	{taint: "reset-required", event: "GPUResetRequired", severity: Error, text: "needs a reset", broken: true, pods: true, free: true, remedy: "Reset it, or restart the node (docs/how-to/troubleshoot.md#how-to-reset-a-gpu)"},
	{taint: "recovery-required", event: "GPURecoveryRequired", severity: Error, text: "needs VALUE", broken: true, pods: true, free: true, remedy: "Do what the NVIDIA driver wants (docs/how-to/troubleshoot.md#gpu-needs-a-reset)"},
	{taint: "memory-unrepairable", event: "GPUMemoryUnrepairable", severity: Error, text: "memory broken for good", broken: true, pods: true, free: true, remedy: "Have the GPU replaced"},
	{taint: "row-remap-failed", event: "GPURowRemapFailed", severity: Error, text: "broken memory", broken: true, pods: true, free: true, remedy: "Reset the GPU. If it lasts, have it replaced (docs/how-to/troubleshoot.md#gpu-not-healthy)"},
	{taint: "unresponsive", event: "GPUUnresponsive", severity: Error, text: "does not answer", broken: true, pods: true, remedy: "See whether the NVIDIA driver is loaded. If it lasts, drain the node and restart it (docs/how-to/troubleshoot.md#gpu-does-not-answer)"},
	{taint: "xid", event: "GPUXID", severity: Error, text: "XID VALUE", broken: true, pods: true, free: true, remedy: "Do what docs/reference/xids.md says of this number"},
	{taint: "uncorrected-ecc", event: "GPUUncorrectedECC", severity: Error, text: "uncorrected error of memory", broken: true, pods: true, remedy: "It ends after a quiet time. If it happens again, contact the vendor"},
	{event: "GPUHeldBack", severity: Warning, text: "held back after a fault that is over", broken: true, remedy: "Wait until the time that the event gives, or replace the GPU (docs/how-to/troubleshoot.md#a-gpu-works-again-and-is-still-tainted)"},
	{taint: "row-remap-pending", event: "GPURowRemapPending", severity: Warning, text: "memory will be repaired at the next reset", remedy: "Reset the GPU when no pod uses it: kubectl gpu cordon GPU says which do (docs/how-to/troubleshoot.md#how-to-reset-a-gpu)"},
	{taint: "fabric-unhealthy", event: "GPUFabricUnhealthy", severity: Error, text: "no good connection to the NVLink fabric", pods: true, remedy: "Look at NVLink (nvidia-smi -q, Fabric) and at the fabric manager"},
	{taint: "throttled", event: "GPUThrottled", severity: Warning, text: "throttled", pods: true, remedy: "Check cooling and power supply"},
	{taint: "unmonitored", event: "GPUUnmonitored", severity: Warning, text: "errors are not reported", remedy: "The event GPUUnmonitored of the node says why, such as a driver that is too old"},
	{taint: "mps-unhealthy", event: "MPSUnhealthy", severity: Error, text: "MPS accepts no clients", pods: true, remedy: "If it lasts, delete the pods that have the device (docs/how-to/troubleshoot.md#mps-server-died)"},
	{taint: "mps-unavailable", event: "MPSUnavailable", severity: Error, text: "the MPS supervisor does not answer", wholeNode: true, pods: true, remedy: "Look at the pod of the MPS supervisor on the node"},
	{taint: "occupied", event: "GPUOccupied", severity: Warning, text: "somebody else made a partition there", remedy: "If nobody wants it, remove it with nvidia-smi mig -dci and -dgi (docs/how-to/troubleshoot.md#partitions-of-other-tools)"},
	{taint: "foreign-claim", event: "GPUForeignClaim", severity: Warning, text: "may be in use by the claim VALUE of another driver with this name", remedy: "VALUE is the claim's namespace.name: delete its pods, so that they are made again with devices of this driver (docs/how-to/troubleshoot.md#another-gpu-driver-runs-on-the-node)"},
	{taint: "release-pending", event: "GPUReleasePending", severity: Warning, text: "what a claim left could not be removed yet", follows: true, remedy: "If it lasts, end what the event GPUReleasePending of the node names, often a process that still runs (docs/how-to/troubleshoot.md#leftovers)"},
	{taint: "opened", event: "GPUOpened", severity: Warning, text: "a process without a claim has its device node open", remedy: "It keeps nobody away; the event GPUOpened of the node names it. An agent of the node belongs into kubeletPlugin.ignoredNamespaces (docs/how-to/free-gpus.md)"},
	{taint: "cordoned", event: "GPUCordoned", check: "gpus", severity: Note, text: "cordoned by an administrator", command: "kubectl gpu uncordon", remedy: "Uncordon it when what it was cordoned for is done (docs/how-to/troubleshoot.md#cordon-one-gpu)"},
	{taint: "gone", event: "PartitionGone", severity: Warning, text: "a partition that a claim has was removed", claims: true, pods: true, free: true, remedy: "Delete the pods: those that run do not get it back"},

	{event: "GPUNotListed", severity: Warning, text: "on the PCI bus, and the NVIDIA driver does not list it", remedy: "Read the kernel log of the node (docs/how-to/troubleshoot.md#a-gpu-is-missing)"},
	{event: "CordonedGPUUnknown", severity: Warning, text: "the annotation of cordoned GPUs names something that is no GPU", remedy: "Correct it (docs/how-to/troubleshoot.md#cordon-one-gpu)"},
	{event: "SharingPolicyInvalid", severity: Error, text: "the sharing policy cannot be used", over: "SharingPolicyValid", remedy: "Correct the policy; nothing has to be restarted (docs/how-to/policy.md)"},
	{event: "SharingPolicyProfilesUnknown", severity: Warning, text: "the sharing policy names profiles that no GPU has", over: "SharingPolicyProfilesKnown", remedy: "Correct the profile's name in the sharing policy, or leave it out for these GPUs"},
	{event: "ClusterLacksFeature", severity: Warning, text: "not everything is published", remedy: upgradeTo},
	{event: "SchedulerCrashes", severity: Warning, text: "the scheduler crashes at certain claims", remedy: upgradeTo},
	{event: "DamagedClaimRecord", severity: Warning, text: "the record of a claim cannot be read", remedy: "Nothing if the claim is prepared again (docs/how-to/troubleshoot.md#record-damaged)"},
	{event: "GPUsWithoutClaims", severity: Warning, text: "containers without a claim can have GPUs", over: "GPUsOnlyWithClaims", remedy: "Change the settings of the runtime (docs/concepts/security.md#images-that-ask-for-all-gpus)"},
	{event: "NodeLabelsOfOthers", severity: Warning, text: "labels of others differ from the driver's", remedy: "Remove them, or set kubeletPlugin.nodeLabels to Never (docs/how-to/node-labels.md#labels-of-others)"},
	{event: "DevicePluginOnNode", check: "device-plugin"},
	{event: "MIGManagerOnNode", check: "mig-manager"},
	{event: "OtherDRADriverOnNode", check: "one-driver"},

	{event: "GPUProgramError", severity: Warning, text: "a program had an error", past: true},
	{event: "OrphanedClaimReleased", severity: Warning, text: "the devices of a claim that is gone were released", past: true},
	{event: "OrphanedClaimInUse", severity: Warning, text: "processes use the devices of a claim that is gone", outlivesClaim: true, remedy: "End them (docs/how-to/troubleshoot.md#a-gpu-is-in-use-who-has-it)"},
	{event: "MemoryLimitIgnored", severity: Warning, text: "a container asks for a memory limit that its driver does not hold", remedy: "It runs without it: ask for memory in the claim, or use a node whose devices have memoryLimit: driver (docs/concepts/time-slicing.md#a-limit-that-the-driver-holds)"},
	{event: "MPSClientKilled", severity: Warning, text: "a process that shared the MPS server was killed", remedy: "To be safe, restart the pods (docs/how-to/troubleshoot.md#mps-server-died)"},
	{event: "MPSServerLost", severity: Warning, text: "processes have lost their MPS server", pods: true, free: true, untilRestart: true, remedy: "If the programs of these pods did not end, delete the pods (docs/how-to/troubleshoot.md#mps-server-died)"},
}

// causeOfTaint returns the cause of a taint, or nil.
func causeOfTaint(name string) *cause {
	if at := slices.IndexFunc(causes, func(c cause) bool { return c.taint == name && name != "" }); at >= 0 {
		return &causes[at]
	}
	return nil
}

// Meaning returns what a taint of the driver says to people, by the name part of its key and its value, and what helps.
func Meaning(taint, value string) (text, remedy string, known bool) {
	c := causeOfTaint(taint)
	if c == nil {
		return "", "", false
	}
	filled := strings.NewReplacer("VALUE", cmp.Or(value, "?"))
	return filled.Replace(c.text), filled.Replace(c.remedy), true
}

// unknown is the cause of events about claims that the table does not know.
var unknown = cause{severity: Warning, text: "an event that this version does not know", remedy: adviceOfEvent}

const adviceOfEvent = "Do what the event says; docs/how-to/troubleshoot.md goes by its name"

// causeOfEvent returns the cause of an event. What the table does not know it has no advice for.
func causeOfEvent(reason string) *cause {
	if at := slices.IndexFunc(causes, func(c cause) bool { return c.event == reason }); at >= 0 {
		return &causes[at]
	}
	return &cause{severity: Warning, text: said(reason), remedy: adviceOfEvent}
}

// heldBack is the cause of a taint that stays when its fault is over.
var heldBack = causeOfEvent("GPUHeldBack")

// fault returns the cause that an event is about, and whether the event says that it is over and its taint stays.
func (c *cause) fault(text string) (of *cause, isOver bool) {
	if c != heldBack {
		return c, c.taint != "" && strings.HasPrefix(text, device.HeldBack)
	}
	at := slices.IndexFunc(causes, func(o cause) bool { return o.taint != "" && o.isOverBy(recovered, text) })
	if at < 0 {
		return c, false
	}
	return &causes[at], true
}

// isTainted reports whether a taint lasts as long as the cause, where there is something to taint.
func (c *cause) isTainted() bool { return c.taint != "" || c.broken }

// isOverBy reports whether the driver says so with an event, by its reason and what it says of the GPU.
func (c *cause) isOverBy(reason, text string) bool {
	if !c.isTainted() {
		return c.over != "" && reason == c.over
	}
	return strings.HasSuffix(reason, recovered) && (c.taint == "" || strings.HasPrefix(text, device.Reason(c.taint).Over()))
}

// endsBy also knows that the driver says of no GPU that fails that it has recovered from something else.
func (c *cause) endsBy(reason, text string) bool {
	return c.isOverBy(reason, text) || device.Reason(c.taint).IsFailure() && slices.ContainsFunc(causes, func(o cause) bool {
		return o.taint != "" && o.isOverBy(reason, text)
	})
}

// recovered ends the reasons of events that say that a condition of GPUs is over.
const recovered = "Recovered"

// family is the cause under which a GPU has an incident.
func (c *cause) family() *cause {
	if c.broken {
		return &causes[0]
	}
	return c
}
