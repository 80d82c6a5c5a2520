// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// forbidden hides what a user may not list.
func forbidden(f *fleettest.Fleet, resources ...string) {
	for _, r := range resources {
		f.Missing = append(f.Missing, fleet.Missing{Resource: r, Err: apierrors.NewForbidden(resourceapi.Resource(r), "", errors.New("no"))})
	}
}

// claimed mounts a volume claim into a pod.
func claimed(pod *corev1.Pod, name string) *corev1.Pod {
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name},
	}})
	return pod
}

// ephemeral gives a pod a volume that is made for it.
func ephemeral(pod *corev1.Pod) *corev1.Pod {
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}})
	return pod
}

// said is what the scheduler has said of a pod for 12 seconds.
func said(pod *corev1.Pod, message string) *corev1.Pod {
	since := metav1.NewTime(now.Add(-12 * time.Second))
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: message, LastTransitionTime: since}}
	return pod
}

func event(component, reason, message string) corev1.Event {
	return corev1.Event{Type: corev1.EventTypeWarning, Reason: reason, Message: message, Source: corev1.EventSource{Component: component}}
}

// template adds a template for one GPU and a pod whose claim has not been made of it.
func template(f *fleettest.Fleet) *corev1.Pod {
	f.Templates = append(f.Templates, &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "one"}})
	f.Templates[0].Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{fleettest.Request(whole)}
	return f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("one")})
}

func limits(pod *corev1.Pod, name corev1.ResourceName) *corev1.Pod {
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{name: resource.MustParse("1")}
	return pod
}

// nowhere is what is said where no node publishes devices of the driver.
const nowhere = "no node publishes devices of driver " + fleettest.Driver + ": Partage does not run anywhere"

// withdraw withdraws the devices of a type, on some nodes or on all.
func withdraw(f *fleettest.Fleet, kind string, nodes ...string) {
	since := metav1.NewTime(fleettest.Start)
	for i, s := range f.Slices {
		if len(nodes) > 0 && !slices.Contains(nodes, ptr.Deref(s.Spec.NodeName, "")) {
			continue
		}
		f.Slices[i] = s.DeepCopy()
		for n := range f.Slices[i].Spec.Devices {
			if d := &f.Slices[i].Spec.Devices[n]; textOf(d, "type") == kind {
				d.Taints = append(d.Taints, resourceapi.DeviceTaint{Key: fleettest.Driver + "/withdrawn", Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: &since})
			}
		}
	}
}

// uncertain are states in which devices are free, or look free, and that is not all there is to it.
var uncertain = []struct {
	explained
	events []corev1.Event
	unread error
	// volumes are those that there are, with what is to be said of them.
	volumes map[string]string
}{
	{explained: explained{name: "claims of others cannot be read", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceClaims)
		return waits(fleettest.Request(whole))(f)
	}, verdict: Unknown, says: []string{"claims of other namespaces"}}},
	{explained: explained{name: "nor what would help", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceClaims)
		return waits(fleettest.Request(mig, fleettest.Profile("1g.5gb")))(f)
	}, verdict: Waits, cause: NotSelected, says: []string{
		"as far as can be seen", "1g.10gb in place of 1g.5gb: it may fit on node n1, but claims of others are unknown",
	}, silent: []string{"it fits"}}},
	{explained: explained{name: "nor how much is free", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceClaims)
		f.Held("team", "one", "n1", fleettest.Request(whole))
		f.Held("team", "other", "n2", fleettest.Request(whole))
		return waits(fleettest.Count(2, whole))(f)
	}, verdict: Waits, cause: Held, says: []string{"at most 1 free on node n1, 2 wanted", "team/one ends: it may fit on node n1, but"}}},
	{explained: explained{name: "nor what would help without taints", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceTaintRules)
		return waits(fleettest.Count(3, whole))(f)
	}, verdict: Waits, cause: TooFewDevices, says: []string{"it may fit on node n1, but not everything could be looked at"}}},
	{explained: explained{name: "rules cannot be read", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceTaintRules)
		return waits(fleettest.Request(whole))(f)
	}, verdict: Unknown, says: []string{"rules that taint devices"}}},
	{explained: explained{name: "rules that there are not", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Missing = []fleet.Missing{{Resource: fleet.ResourceTaintRules, Err: errors.New("none"), Absent: true}}
		return waits(fleettest.Request(whole))(f)
	}, verdict: Allocatable}},
	{explained: explained{name: "pods of others cannot be read", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourcePods)
		return waits(fleettest.Request(whole))(f)
	}, verdict: Unknown, says: []string{"CPU"}}},
	{explained: explained{name: "kept from nodes of which it is hidden what they have left", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceClaims, fleet.ResourcePods)
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("65")}
		return pod
	}, verdict: Waits, cause: NodeExcluded, says: []string{"nodes n1, n2 excluded: the pod wants 65 cpu, of the node's 64 are at most 64 left"}, silent: []string{"would fit"}}},
	{explained: explained{name: "affinity between pods", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "kubernetes.io/hostname"}}}}
		return pod
	}, verdict: Unknown, says: []string{"affinity"}}},
	{explained: explained{name: "topology spread and a port", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}
		pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{HostPort: 80}}
		return pod
	}, verdict: Unknown, says: []string{"topology spread", "ports"}}},
	{explained: explained{name: "another scheduler", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.SchedulerName = "volcano"
		return pod
	}, verdict: Unknown, says: []string{"scheduler volcano"}}},
	{explained: explained{name: "quota for less", make: template, verdict: Waits, cause: ClaimNotCreated, says: []string{
		"with a larger quota, or with less: the request alone exceeds it: kubectl describe quota -n team"}, silent: []string{"has ended"}},
		events: []corev1.Event{event("resource_claim", "FailedResourceClaimCreation",
			"exceeded quota: q, requested: count/claims=1,gpus=5, used: count/claims=0,gpus=0, limited: count/claims=9,gpus=4")}},
	{explained: explained{name: "quota that is used", make: template, verdict: Waits, cause: ClaimNotCreated, says: []string{"has ended"}},
		events: []corev1.Event{event("resource_claim", "FailedResourceClaimCreation",
			"exceeded quota: q, requested: gpus=4, used: gpus=1, limited: gpus=4")}},
	{explained: explained{name: "quota", make: template, verdict: Waits, cause: ClaimNotCreated, says: []string{"exceeded quota: gpus", "kubectl describe quota -n team"}},
		events: []corev1.Event{event("resource_claim", "FailedResourceClaimCreation", `PodResourceClaim gpu: failed to create claim: resourceclaims "llm-gpu-x" is forbidden: exceeded quota: gpus`)}},
	{explained: explained{name: "quota in time", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := template(f)
		claim := f.Claim("team", "llm-gpu-x", fleettest.Request(whole))
		claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: new(true)}}
		pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim.Name}}
		return pod
	}, verdict: Allocatable}, events: []corev1.Event{event("resource_claim", "FailedResourceClaimCreation", "exceeded quota")}},
	{explained: explained{name: "events cannot be read", make: template, verdict: Unknown, says: []string{"events"}}, unread: errors.New("forbidden")},
	{explained: explained{name: "another controller", make: waits(fleettest.Request(whole)), verdict: Unknown, says: []string{"gang-controller", "waits for two more"}},
		events: []corev1.Event{event("default-scheduler", "FailedScheduling", "none"), event("gang-controller", "GangIncomplete", "waits for two more")}},
	{explained: explained{name: "no volume", make: func(f *fleettest.Fleet) *corev1.Pod { return claimed(waits(fleettest.Request(whole))(f), "models") },
		verdict: Waits, cause: VolumeMissing, says: []string{"PersistentVolumeClaim models, which does not exist in namespace team"}},
		volumes: map[string]string{}},
	{explained: explained{name: "two MPS shares in one container", make: waits(fleettest.Share(mps, "10Gi", "25"), fleettest.Share(mps, "10Gi", "25")), verdict: Waits, cause: CannotStart,
		says: []string{"Pod team/llm cannot start, even with its devices.", "container main would have 2 MPS shares", "one share of the sum"}}},
	{explained: explained{name: "an MPS share and a GPU in one container", make: waits(fleettest.Share(mps, "10Gi", "25"), fleettest.Request(whole)), verdict: Waits, cause: CannotStart,
		says: []string{"container main would have an MPS share and other devices"}}},
	{explained: explained{name: "two MPS shares in two containers", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Share(mps, "10Gi", "25"), fleettest.Share(mps, "10Gi", "25"))(f)
		pod.Spec.Containers = append(pod.Spec.Containers, *pod.Spec.Containers[0].DeepCopy())
		pod.Spec.Containers[0].Resources.Claims[0].Request, pod.Spec.Containers[1].Resources.Claims[0].Request = "gpu", "gpu-1"
		return pod
	}, verdict: Allocatable}},
	{explained: explained{name: "a user namespace with MPS", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Share(mps, "10Gi", "25"))(f)
		pod.Spec.HostUsers = new(false)
		return pod
	}, verdict: Waits, cause: CannotStart, says: []string{"hostUsers: false", "leave hostUsers: false out, or ask for another class"}}},
	{explained: explained{name: "a user namespace with a GPU", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.HostUsers = new(false)
		return pod
	}, verdict: Allocatable}},
	{explained: explained{name: "put on a node past the scheduler", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.NodeName, pod.Status.Phase = "n1", "" // as in a file
		return pod
	}, verdict: Waits, cause: CannotStart, says: []string{"claim llm is not allocated: the pod is put on node n1 by spec.nodeName", "nodeSelector kubernetes.io/hostname"}}},
	{explained: explained{name: "no Secret, and others are optional or there", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		key := corev1.LocalObjectReference{Name: "token"}
		pod.Spec.Containers[0].Env = []corev1.EnvVar{{ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: key}}}}
		pod.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: key, Optional: new(true)}}}
		pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "there"}}}}}
		return pod
	}, verdict: Waits, cause: CannotStart, says: []string{"Secret token, which does not exist in namespace team", "with a Secret token in namespace team"}, silent: []string{"ConfigMap"}}},
	{explained: explained{name: "a Secret that may not be read", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		source := corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "hidden"}}}
		pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{source}}}}}
		return pod
	}, verdict: Allocatable, says: []string{"Whether Secret hidden exists is unknown: forbidden"}}},
	{explained: explained{name: "no volume, and no device", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return claimed(waits(fleettest.Request(whole))(f), "models")
	}, verdict: Waits, cause: VolumeMissing, says: []string{"with a PersistentVolumeClaim models", "In the way"}, silent: []string{"it fits", "ends"}},
		volumes: map[string]string{}},
	{explained: explained{name: "quota, and no device", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return template(f)
	}, verdict: Waits, cause: ClaimNotCreated, says: []string{"with a larger quota"}, silent: []string{"it fits", "ends"}},
		events: []corev1.Event{event("resource_claim", "FailedResourceClaimCreation", "exceeded quota: gpus")}},
	{explained: explained{name: "the scheduler found none, and it is hidden who has them", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceClaims)
		return said(waits(fleettest.Request(whole))(f), "0/2 nodes are available: 2 cannot allocate all claims. still not schedulable, preemption: 0/2")
	}, verdict: Waits, cause: NotScheduled, says: []string{"Pod team/llm waits: the scheduler has found no node for it.", "the scheduler has said for 12s: 0/2", "Not looked at:\n  - claims of other"},
		silent: []string{"may wait or not", "No single change", "could be allocated now"}}},
	{explained: explained{name: "the scheduler found none, and classes are hidden", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceClasses)
		return said(waits(fleettest.Request(whole))(f), "0/2 nodes are available: 2 cannot allocate all claims.")
	}, verdict: Waits, cause: NotScheduled}},
	{explained: explained{name: "the scheduler says what is not looked at", make: func(f *fleettest.Fleet) *corev1.Pod {
		return said(waits(fleettest.Request(whole))(f), "0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) exceed max volume count. preemption: 0/2")
	}, verdict: Waits, cause: NotScheduled, says: []string{"max volume count"}, silent: []string{"could be allocated now"}}},
	{explained: explained{name: "the scheduler said what is over", make: func(f *fleettest.Fleet) *corev1.Pod {
		return said(waits(fleettest.Request(whole))(f), "0/2 nodes are available: 1 cannot allocate all claims, 1 Insufficient cpu, 1 node(s) had untolerated taint(s). preemption: 0/2")
	}, verdict: Allocatable, says: []string{"could be allocated now"}}},
	{explained: explained{name: "volume made for the pod", make: func(f *fleettest.Fleet) *corev1.Pod { return ephemeral(waits(fleettest.Request(whole))(f)) },
		verdict: Unknown, says: []string{"PersistentVolumeClaim llm-scratch is not bound"}}, volumes: map[string]string{"llm-scratch": "is not bound"}},
	{explained: explained{name: "volume made for the pod, not yet", make: func(f *fleettest.Fleet) *corev1.Pod { return ephemeral(waits(fleettest.Request(whole))(f)) },
		verdict: Unknown, says: []string{"volume scratch is made for the pod"}}, volumes: map[string]string{}},
	{explained: explained{name: "volume made for the pod that it waits for", make: func(f *fleettest.Fleet) *corev1.Pod {
		return said(ephemeral(waits(fleettest.Request(whole))(f)), "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found")
	}, verdict: Waits, cause: NotScheduled, says: []string{"unbound immediate", "llm-scratch is not bound"}}, volumes: map[string]string{"llm-scratch": "is not bound"}},
	{explained: explained{name: "volume not bound", make: func(f *fleettest.Fleet) *corev1.Pod { return claimed(waits(fleettest.Request(whole))(f), "models") },
		verdict: Unknown, says: []string{"PersistentVolumeClaim models is not bound"}},
		volumes: map[string]string{"models": "is not bound"}},
	{explained: explained{name: "volume", make: func(f *fleettest.Fleet) *corev1.Pod { return claimed(waits(fleettest.Request(whole))(f), "models") },
		verdict: Allocatable}, volumes: map[string]string{"models": ""}},
	{explained: explained{name: "partition of the device plugin", make: func(f *fleettest.Fleet) *corev1.Pod { return limits(f.Pod("team", "llm"), "nvidia.com/mig-1g.10gb") },
		verdict: Waits, cause: ResourceUnserved, says: []string{"nvidia.com/mig-1g.10gb", "class mig.nvidia.com", "profile 1g.10gb"}, silent: []string{"asks for no devices"}}},
	{explained: explained{name: "misspelt resource", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Classes[0].Spec.ExtendedResourceName = new("nvidia.com/gpu")
		return limits(f.Pod("team", "llm"), "nvidia.com/gpus")
	}, verdict: Waits, cause: ResourceUnserved, says: []string{"nvidia.com/gpus", "nvidia.com/gpu: did you mean that?"}}},
	{explained: explained{name: "resource of a device plugin", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Nodes[0].Status.Allocatable["example.com/card"] = resource.MustParse("2")
		return limits(f.Pod("team", "llm"), "example.com/card")
	}, verdict: NoDevices}},
	{explained: explained{name: "nodes that could offer it cannot be read", make: func(f *fleettest.Fleet) *corev1.Pod {
		forbidden(f, fleet.ResourceNodes)
		f.Nodes = nil
		return limits(f.Pod("team", "llm"), "nvidia.com/mig-1g.10gb")
	}, verdict: Unknown, says: []string{"nvidia.com/mig-1g.10gb"}}},
	{explained: explained{name: "its own predecessor", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		pod := waits(fleettest.Request(whole))(f)
		f.Claims = slices.DeleteFunc(f.Claims, func(c *resourceapi.ResourceClaim) bool { return c.Name == "n1-0" })
		f.Held("team", "old", "n1", fleettest.Request(whole))
		for hash, p := range map[string]*corev1.Pod{"new": pod, "old": f.Pods[len(f.Pods)-1]} {
			p.Labels = map[string]string{"pod-template-hash": hash}
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-" + hash, Controller: new(true)}}
		}
		return pod
	}, verdict: Waits, cause: OwnPredecessor, says: []string{"deployment web", "maxSurge", "maxUnavailable"}}},
	{explained: explained{name: "priority", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.Priority = new(int32(1000))
		return pod
	}, verdict: Waits, cause: Held, says: []string{"priority 1000", "does not preempt"}}},
	{explained: explained{name: "more than a GPU", make: waits(fleettest.Share(mps, "10Gi", "200")), verdict: Waits, cause: CapacityTooLarge,
		says: []string{"smPercent 200 is too much"}, silent: []string{"In the way"}}},
	{explained: explained{name: "more than a GPU of a full cluster", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, node := range []string{"n1", "n2"} {
			for i := range 2 {
				f.Held("other", node+string(rune('a'+i)), node, fleettest.Share(mps, "60Gi", "100"))
			}
		}
		return waits(fleettest.Share(mps, "10Gi", "200"))(f)
	}, verdict: Waits, cause: CapacityTooLarge, says: []string{"smPercent 200 is too much", "with smPercent 100 in place of 200; then it waits for"}, silent: []string{"In the way", "memory left"}}},
	{explained: explained{name: "partition of too much memory", make: waits(fleettest.Share(mig, "80Gi", "")), verdict: Waits, cause: CapacityTooLarge,
		says: []string{"no device has more than 79.2Gi"}, silent: []string{"20096Mi"}}},
	{explained: explained{name: "no share left", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, n := range []string{"n1", "n2"} {
			f.Held("other", n, n, fleettest.Request(whole))
			f.Held("other", n+"x", n, fleettest.Count(1, slice))
		}
		for _, c := range f.Claims {
			for i := range c.Status.Allocation.Devices.Results {
				if r := &c.Status.Allocation.Devices.Results[i]; r.ShareID != nil {
					r.ConsumedCapacity["shares"] = resource.MustParse("1000")
				}
			}
		}
		return waits(fleettest.Request(slice))(f)
	}, verdict: Waits, cause: CapacityUsed, says: []string{"no share left"}, silent: []string{"too little shares"}}},
	{explained: explained{name: "typo on a full cluster", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return waits(fleettest.Request(mig, fleettest.Profile("3g.20gb")))(f)
	}, verdict: Waits, cause: NotSelected, says: []string{"with profile 3g.40gb in place of 3g.20gb; then it waits for other/"}}},
	{explained: explained{name: "misspelt capacity", make: func(f *fleettest.Fleet) *corev1.Pod {
		r := fleettest.Share(mps, "10Gi", "")
		r.Exactly.Capacity.Requests["memroy"] = resource.MustParse("10Gi")
		delete(r.Exactly.Capacity.Requests, "memory")
		return waits(r)(f)
	}, verdict: Waits, cause: CapacityUnknown, says: []string{"with capacity memory in place of memroy"}}},
	{explained: explained{name: "misspelt capacity on a full cluster", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		r := fleettest.Share(mps, "10Gi", "")
		r.Exactly.Capacity.Requests["memroy"] = resource.MustParse("10Gi")
		delete(r.Exactly.Capacity.Requests, "memory")
		return waits(r)(f)
	}, verdict: Waits, cause: CapacityUnknown, says: []string{"with capacity memory in place of memroy; then it waits for other/"}}},
	{explained: explained{name: "too much memory on a full cluster", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return waits(fleettest.Request(mig, "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('200Gi')) >= 0"))(f)
	}, verdict: Waits, cause: NotSelected, says: []string{"with memory 79Gi in place of 200Gi; then it waits for other/"}}},
	{explained: explained{name: "all alternatives are taken", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return waits(alternatives(fleettest.Request(whole), fleettest.Request(mig, fleettest.Profile("3g.40gb")), fleettest.Share(mps, "10Gi", "")))(f)
	}, verdict: Waits, cause: Held, says: []string{
		"Pod team/llm waits: all 3 alternatives are taken.", "none of the 3 alternatives of request gpu of claim llm can be allocated:\n    choice-0: 4 of 4 matching devices are held by claims\n    choice-1: ",
	}, silent: []string{"(claim llm, request gpu/choice-0)"}}},
	{explained: explained{name: "one alternative is misspelt, and the other taken", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return waits(alternatives(fleettest.Request(mig, fleettest.Profile("3g.20gb")), fleettest.Request(whole)))(f)
	}, verdict: Waits, cause: Held, says: []string{"Pod team/llm waits: what it could use is taken.", "choice-0: none of 72 devices", "No device has profile 3g.20gb"}}},
	{explained: explained{name: "one alternative of two requests", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		other := fleettest.Request("network")
		other.Name = "network"
		attach(f, nil, func(d *resourceapi.Device) { d.NodeName = new("elsewhere") })
		return waits(alternatives(fleettest.Request(whole), fleettest.Share(mps, "10Gi", "")), other)(f)
	}, verdict: Waits, cause: NotOfClass, says: []string{"Pod team/llm waits: no device is what it asks for.", "is of class network", "none of the 2 alternatives"}}},
	{explained: explained{name: "a control plane is no reason", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		f.Nodes = append(f.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "control"}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}}})
		return waits(fleettest.Request(whole))(f)
	}, verdict: Waits, cause: Held, says: []string{"Pod team/llm waits: what it could use is taken.", "node control excluded"}}},
	{explained: explained{name: "kept from the nodes with devices, and these are full", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		f.Nodes = append(f.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "small", Labels: map[string]string{"pool": "small"}}})
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.NodeSelector = map[string]string{"pool": "small"}
		return pod
	}, verdict: Waits, cause: NodeExcluded, says: []string{"Pod team/llm waits: something other than devices keeps it from nodes.", "nodes n1, n2 would fit if less were taken, but excluded: nodeSelector wants pool=small", "with a nodeSelector that node n1 has; then it waits for other/n1-0"}}},
	{explained: explained{name: "withdrawn by the policy", make: func(f *fleettest.Fleet) *corev1.Pod {
		taint(f)
		since := metav1.NewTime(fleettest.Start)
		f.TaintRules[0].Spec.Taint = resourceapi.DeviceTaint{Key: fleettest.Driver + "/withdrawn", Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: &since}
		return waits(fleettest.Request(slice))(f)
	}, verdict: Waits, cause: Withdrawn, says: []string{
		"the sharing policy does not offer what it asks for any more.",
		"the administrator's sharing policy does not offer time slices any more, since " + fleettest.Start.UTC().Format("2006-01-02 15:04Z"),
	}, silent: []string{"are tainted"}}},
	{explained: explained{name: "withdrawn and taken", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		withdraw(f, fleet.TypeTimeSlice)
		return waits(fleettest.Request(slice))(f)
	}, verdict: Waits, cause: Withdrawn, says: []string{
		"Pod team/llm waits: the sharing policy does not offer what it asks for any more.", "4 of 4 matching devices are withdrawn",
		"any more, since " + fleettest.Start.UTC().Format("2006-01-02 15:04Z"),
		"What would help:\n  - with another kind of devices (there are MIG partitions, MPS shares, whole GPUs), or ask the administrator",
	}, silent: []string{"then it waits", "is gone", "In the way", "No single change"}}},
	{explained: explained{name: "withdrawn, of two requests", make: func(f *fleettest.Fleet) *corev1.Pod {
		withdraw(f, fleet.TypeTimeSlice)
		other := fleettest.Request(slice)
		other.Name = "other"
		return waits(fleettest.Request(slice), other)(f)
	}, verdict: Waits, cause: Withdrawn, says: []string{"request gpu)", "request other-1)"}, silent: []string{"administrator\n  - with another kind"}}},
	{explained: explained{name: "withdrawn and taken, of an extended resource", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		withdraw(f, fleet.TypeTimeSlice)
		for _, c := range f.Classes {
			if c.Name == slice {
				c.Spec.ExtendedResourceName = new("nvidia.com/gpu.shared")
			}
		}
		return limits(f.Pod("team", "llm"), "nvidia.com/gpu.shared")
	}, verdict: Waits, cause: Withdrawn, says: []string{
		"the sharing policy does not offer what it asks for any more.", "with another kind of devices", "4 of 4 matching devices are withdrawn",
	}, silent: []string{"is taken", "In the way", "No single change"}}},
	{explained: explained{name: "withdrawn on one node, taken on the other", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		withdraw(f, fleet.TypeTimeSlice, "n1")
		return waits(fleettest.Request(slice))(f)
	}, verdict: Waits, cause: CountersUsed, says: []string{
		"Pod team/llm waits: what it could use is taken.", "2 of 4 matching devices are withdrawn", "when other/n2-0 ends",
	}, silent: []string{"is gone", "another kind", "claim other/n1-0"}}},
	{explained: explained{name: "too few of those that are not withdrawn", make: func(f *fleettest.Fleet) *corev1.Pod {
		withdraw(f, fleet.TypeTimeSlice, "n1")
		return waits(fleettest.Count(3, slice))(f)
	}, verdict: Waits, cause: TooFewDevices, says: []string{"no node has more than 2 that match; 2 of 4 matching devices are withdrawn", "with count 2"}}},
	{explained: explained{name: "withdrawn long ago", make: func(f *fleettest.Fleet) *corev1.Pod {
		for i := range f.Slices {
			f.Slices[i] = f.Slices[i].DeepCopy()
			f.Slices[i].Spec.Devices = slices.DeleteFunc(f.Slices[i].Spec.Devices, func(d resourceapi.Device) bool { return textOf(&d, "type") == fleet.TypeTimeSlice })
		}
		return waits(fleettest.Request(slice))(f)
	}, verdict: Waits, cause: NotOfClass, says: []string{"is of class timeslice.partage.dev: the administrator's sharing policy does not offer time slices there, or the GPUs cannot have them"}}},
	{explained: explained{name: "extended resource without driver", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices, f.Classes = nil, nil
		return limits(f.Pod("team", "llm"), "nvidia.com/gpu.shared")
	}, verdict: Waits, cause: ResourceUnserved, says: []string{nowhere, "when Partage is installed"}, silent: []string{"a claim"}}},
	{explained: explained{name: "resource of others without driver", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices, f.Classes = nil, nil
		return limits(f.Pod("team", "llm"), "example.com/card")
	}, verdict: Waits, cause: ResourceUnserved, silent: []string{"a claim", "Partage"}}},
	{explained: explained{name: "extended resource of a class without driver", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices = nil
		f.Classes[0].Spec.ExtendedResourceName = new("nvidia.com/gpu")
		return limits(f.Pod("team", "llm"), "nvidia.com/gpu")
	}, verdict: Waits, cause: NoSlices, says: []string{nowhere, "when Partage is installed"}, silent: []string{"a claim", "No single change"}}},
	{explained: explained{name: "class without driver", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices, f.Classes = nil, nil
		return waits(fleettest.Request(whole))(f)
	}, verdict: Waits, cause: ClassMissing, says: []string{"DeviceClass gpu.nvidia.com does not exist: " + nowhere, "when Partage is installed"}, silent: []string{"No single change"}}},
	{explained: explained{name: "devices of other drivers only", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices = f.Slices[:0]
		for _, node := range []string{"n1", "n2"} {
			f.Slices = append(f.Slices, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: resourceapi.ResourceSliceSpec{
				Driver: "net.example.com", NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1}, Devices: []resourceapi.Device{{Name: "nic"}},
			}})
		}
		return waits(fleettest.Request(slice))(f)
	}, verdict: Waits, cause: NotOfClass, says: []string{nowhere, "when Partage is installed"}, silent: []string{"sharing policy", "No single change"}}},
	{explained: explained{name: "driver that nobody may see", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices = nil
		forbidden(f, fleet.ResourcePods)
		return waits(fleettest.Request(whole))(f)
	}, verdict: Waits, cause: NoSlices, says: []string{nowhere + ", or has nothing to offer"}}},
	{explained: explained{name: "driver that publishes nothing", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices = nil
		f.Pod("partage", "partage-plugin").Labels = map[string]string{fleet.ComponentLabel: fleet.PluginComponent}
		return waits(fleettest.Request(whole))(f)
	}, verdict: Waits, cause: NoSlices, says: []string{"Partage runs and has nothing to offer", "kubectl gpu doctor"}, silent: []string{"installed"}}},
	{explained: explained{name: "headline of nodes", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.NodeSelector = map[string]string{"pool": "none"}
		return pod
	}, verdict: Waits, cause: NodeExcluded, says: []string{"Pod team/llm waits: something other than devices keeps it from nodes."}}},
	{explained: explained{name: "headline of gates", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "x"}}
		return pod
	}, verdict: Waits, cause: Gated, says: []string{"Pod team/llm waits: the scheduler does not look at it yet."}}},
}

// TestUncertain: that devices can be allocated is said only after everything was looked at that could contradict it.
func TestUncertain(t *testing.T) {
	for _, c := range uncertain {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 2)
			f.AddNode("n2", "h100-80-sxm", 2)
			pod := c.make(f)
			x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
			x.Events = func(*corev1.Pod, []*resourceapi.ResourceClaim) ([]corev1.Event, error) { return c.events, c.unread }
			x.Volume = func(_, name string) (bool, string) { unseen, is := c.volumes[name]; return is, unseen }
			x.Exists = func(_, _, name string) (bool, error) {
				if name == "hidden" {
					return false, errors.New("forbidden")
				}
				return name == "there", nil
			}
			e := x.Pod(t.Context(), pod)
			got := text(t, e)
			if e.Verdict != c.verdict || c.cause != "" && (len(e.Reasons) == 0 || e.Reasons[0].Cause != c.cause) {
				t.Errorf("%s, %+v; want %s, %s", e.Verdict, e.Reasons, c.verdict, c.cause)
			}
			if c.verdict == Unknown {
				c.silent = append(c.silent, "can be allocated now", "fits on")
			}
			if found := c.verdict != Allocatable && c.verdict != NoDevices; e.Found() != found || len(e.FitsOn) > 0 && c.verdict != Allocatable {
				t.Errorf("found %t, want %t; fits on %v", e.Found(), found, e.FitsOn)
			}
			for _, part := range c.says {
				if !strings.Contains(got, part) {
					t.Errorf("want %q in:\n%s", part, got)
				}
			}
			for _, part := range c.silent {
				if strings.Contains(got, part) {
					t.Errorf("%q in:\n%s", part, got)
				}
			}
		})
	}
}

// TestVolume: what the API server says of a volume's claim.
func TestVolume(t *testing.T) {
	bound := func(name, volume string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: volume},
			Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
		}
	}
	client := fake.NewClientset(bound("models", "anywhere"), bound("scratch", "local"), bound("hidden", "hidden"),
		&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "new"}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}},
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "anywhere"}},
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "local"}, Spec: corev1.PersistentVolumeSpec{NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{}}}})
	client.PrependReactor("get", "persistentvolumeclaims", func(a kubetesting.Action) (bool, runtime.Object, error) {
		return a.GetNamespace() == "other", nil, apierrors.NewForbidden(corev1.Resource("persistentvolumeclaims"), "x", errors.New("no"))
	})
	for _, c := range []struct {
		namespace, name, unseen string
		is                      bool
	}{
		{"team", "models", "", true}, {"team", "none", "", false}, {"team", "new", "is not bound", true}, {"team", "scratch", "of some nodes only", true},
		{"team", "hidden", "a volume that cannot be read", true}, {"other", "x", "cannot be read", false},
	} {
		is, unseen := volume(t.Context(), client, c.namespace, c.name)
		if is != c.is || (unseen == "") != (c.unseen == "") || !strings.Contains(unseen, c.unseen) {
			t.Errorf("%s: %t, %q", c.name, is, unseen)
		}
	}
}
