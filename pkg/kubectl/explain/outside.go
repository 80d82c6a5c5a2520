// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// The functions of this file look at what keeps a pod waiting before its devices are looked for, or although they can be allocated.

// hidden finds the lists that cannot be read and whose objects could contradict what is seen.
func hidden(s *sight) found {
	var f found
	for _, h := range []struct {
		resource, text string
		// ofPods says that they concern pods only.
		ofPods bool
	}{
		{fleet.ResourceClaims, "claims of other namespaces cannot be read: they may hold the devices", false},
		{fleet.ResourceTaintRules, "rules that taint devices cannot be read", false},
		{fleet.ResourceNodes, "nodes cannot be read: their labels and taints may keep the pod away", true},
		{fleet.ResourcePods, "pods of other namespaces cannot be read: nodes may have less CPU and memory left than it looks", true},
	} {
		if s.x.model.Hides(h.resource) && (s.pod != nil || !h.ofPods) {
			f.unseen = append(f.unseen, h.text)
		}
	}
	return f
}

// volumes looks at the claims of the pod's volumes.
func volumes(s *sight) found {
	var f found
	for i := range s.pod.Spec.Volumes {
		v := &s.pod.Spec.Volumes[i]
		if s.x.Volume == nil || v.PersistentVolumeClaim == nil {
			continue
		}
		name := v.PersistentVolumeClaim.ClaimName
		switch is, doubt := s.x.Volume(s.pod.Namespace, name); {
		case doubt != "":
			f.unseen = append(f.unseen, fmt.Sprintf("PersistentVolumeClaim %s %s", name, doubt))
		case !is:
			f.reasons = append(f.reasons, Reason{
				Cause: VolumeMissing, Text: fmt.Sprintf("volume %s refers to PersistentVolumeClaim %s, which does not exist in namespace %s", v.Name, name, s.pod.Namespace),
				help: []Suggestion{{Kind: CreateObject, Text: fmt.Sprintf("with a PersistentVolumeClaim %s in namespace %s", name, s.pod.Namespace)}},
			})
		}
	}
	return f
}

// claimFailed is the reason of the event that says that a claim cannot be made of its template.
const claimFailed = "FailedResourceClaimCreation"

// controllers looks at what others than the scheduler and the kubelet say of a pod that is in the cluster. Events are asked for only where
// they could change the verdict: where it would fit, or a claim has not been made of its template.
func controllers(s *sight, fits bool) found {
	unmade := slices.ContainsFunc(s.references, func(c allocation.PodClaim) bool { return c.New })
	if s.x.Events == nil || s.pod.UID == "" || !unmade && !fits {
		return found{}
	}
	var f found
	events, err := s.x.Events(s.pod, nil)
	if err != nil {
		f.unseen = append(f.unseen, fmt.Sprintf("events cannot be read: %v; they would say whether a quota, a webhook or a controller keeps the pod waiting", err))
	}
	said := map[string]bool{}
	for i := range slices.Backward(events) {
		e := &events[i]
		who := cmp.Or(e.ReportingController, e.Source.Component, "somebody")
		switch {
		case e.Type != corev1.EventTypeWarning || said[e.Reason]:
			continue
		case e.Reason == claimFailed:
			if unmade {
				r := Reason{Cause: ClaimNotCreated, Text: "its claim cannot be created: " + e.Message}
				if strings.Contains(e.Message, "exceeded quota") {
					r.help = []Suggestion{{Kind: RaiseQuota, Text: fmt.Sprintf("after claims of the namespace have ended, or with a larger quota: kubectl describe quota -n %s", s.pod.Namespace)}}
				}
				f.reasons = append(f.reasons, r)
			}
		case e.Reason != "FailedScheduling" && who != corev1.DefaultSchedulerName && who != "kubelet":
			f.unseen = append(f.unseen, fmt.Sprintf("%s says of the pod: %s: %s", who, e.Reason, e.Message))
		}
		said[e.Reason] = true
	}
	return f
}

// unexamined finds the parts of the pod's spec that the scheduler looks at, and nothing here does.
func unexamined(s *sight) found {
	spec := &s.pod.Spec
	var f found
	add := func(is bool, what string) {
		if is {
			f.unseen = append(f.unseen, what)
		}
	}
	add(spec.Affinity != nil && (spec.Affinity.PodAffinity != nil && len(spec.Affinity.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 ||
		spec.Affinity.PodAntiAffinity != nil && len(spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0),
		"required affinity between pods is not looked at")
	add(slices.ContainsFunc(spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable != corev1.ScheduleAnyway }),
		"topology spread constraints are not looked at")
	add(slices.ContainsFunc(slices.Concat(spec.InitContainers, spec.Containers), func(c corev1.Container) bool {
		return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.HostPort != 0 })
	}), "ports of the node are not looked at")
	add(spec.SchedulerName != "" && spec.SchedulerName != corev1.DefaultSchedulerName, fmt.Sprintf("scheduler %s decides, which may have rules of its own", spec.SchedulerName))
	return f
}

// gates finds that the scheduler does not look at the pod, whatever there is.
func gates(s *sight) found {
	var all []string
	for _, gate := range s.pod.Spec.SchedulingGates {
		all = append(all, gate.Name)
	}
	if len(all) == 0 {
		return found{}
	}
	text := strings.Join(all, ", ")
	return found{reasons: []Reason{{
		Cause: Gated, Text: "the pod has scheduling gates, and the scheduler does not look at it until they are removed: " + text,
		help: []Suggestion{{Kind: RemoveGates, Text: "after the scheduling gates have been removed by what set them: " + text}},
	}}}
}

// migClass is the chart's class of partitions.
const migClass = "mig.nvidia.com"

// unserved finds extended resources that neither a class nor a device plugin provides: the pod waits for ever.
func unserved(s *sight) found {
	var f found
	var offered []string
	for _, c := range s.x.model.Classes {
		if c.Spec.ExtendedResourceName != nil {
			offered = append(offered, *c.Spec.ExtendedResourceName)
		}
	}
	for _, name := range s.x.planner.Cluster.Unserved(s.pod) {
		if s.x.model.Hides(fleet.ResourceNodes) || s.x.model.Hides(fleet.ResourceClasses) {
			f.unseen = append(f.unseen, fmt.Sprintf("whether a node or a class provides %s", name))
			continue
		}
		help := Suggestion{Kind: UseClaim, Text: "with a claim instead of an extended resource, which kubectl gpu migrate pods writes"}
		profile, isPartition := strings.CutPrefix(string(name), "nvidia.com/mig-")
		switch near := nearest(string(name), offered); {
		case isPartition && s.x.planner.Cluster.Class(migClass) != nil:
			help.Text = fmt.Sprintf("with a claim of class %s for profile %s instead, which kubectl gpu migrate pods writes", migClass, strings.TrimSuffix(profile, ".shared"))
		case near != "":
			help = Suggestion{Kind: ChangeReference, Text: fmt.Sprintf("with %s: did you mean that?", near)}
		}
		f.reasons = append(f.reasons, Reason{
			Cause: ResourceUnserved, Text: fmt.Sprintf("the pod asks for %s, which no DeviceClass and no node provides", name), help: []Suggestion{help},
		})
	}
	return f
}

// rollout finds that the pod of a rolling update waits for what the pod before it has.
func rollout(s *sight, inTheWay []Holder) found {
	kind, name := fleet.OwnerOf(s.pod)
	if kind != "Deployment" {
		return found{}
	}
	own := s.pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	for _, h := range inTheWay {
		for _, p := range s.x.model.Pods {
			k, n := fleet.OwnerOf(p)
			if p.Namespace != s.pod.Namespace || h.Namespace != p.Namespace || !slices.Contains(h.Pods, p.Name) || k != kind || n != name || p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] == own {
				continue
			}
			return found{reasons: []Reason{{
				Cause: OwnPredecessor, Claim: h.Claim, Text: fmt.Sprintf(
					"deployment %s is being updated, and its new pod could use what its old pod %s has. Unless the strategy has maxUnavailable, that ends only when the new pod runs", name, p.Name),
				help: []Suggestion{{Kind: ChangeStrategy, Text: fmt.Sprintf(
					`with maxSurge 0 and maxUnavailable 1: kubectl patch deployment -n %s %s -p '{"spec":{"strategy":{"rollingUpdate":{"maxSurge":0,"maxUnavailable":1}}}}'`, p.Namespace, name)}},
			}}}
		}
	}
	return found{}
}

// priority notes that a pod of priority has to wait all the same.
func priority(s *sight, inTheWay []Holder) found {
	p := ptr.Deref(s.pod.Spec.Priority, 0)
	if p <= 0 || len(inTheWay) == 0 {
		return found{}
	}
	return found{notes: []string{fmt.Sprintf("The pod has priority %d, and still waits: the scheduler does not preempt pods for devices that their claims hold.", p)}}
}

// schedulerSays notes what the scheduler itself said last.
func schedulerSays(s *sight, fits bool) found {
	var f found
	for _, c := range s.pod.Status.Conditions {
		if c.Type != corev1.PodScheduled || c.Status != corev1.ConditionFalse || c.Message == "" {
			continue
		}
		f.notes = append(f.notes, "The scheduler said: "+c.Message)
		if fits {
			f.notes = append(f.notes, "Its devices could be allocated now: the scheduler has not tried again yet.")
		}
	}
	return f
}

// kubelets notes on which nodes a pod that asks for extended resources does not get its devices, because the kubelet does not know
// that these can be devices. The scheduler does not look at that.
func kubelets(s *sight, fitsOn []string) found {
	running := scheduled(s.pod)
	if running && s.pod.Status.ExtendedResourceClaimStatus == nil || !running && s.extended(nil) == nil {
		return found{}
	}
	var old, runs, unknown []string
	for _, n := range s.x.planner.Cluster.Nodes {
		hasGPUs := slices.ContainsFunc(s.x.model.Nodes, func(of *fleet.Node) bool { return of.Name == n.Name })
		if running && n.Name != s.pod.Spec.NodeName || !hasGPUs {
			continue
		}
		knows, err := device.KnowsExtendedResources(n.Status.NodeInfo.KubeletVersion)
		switch {
		case err != nil:
			unknown = append(unknown, n.Name)
		case !knows && slices.Contains(fitsOn, n.Name):
			runs = append(runs, n.Name)
		case !knows:
			old = append(old, n.Name)
		}
	}
	const gate = ", unless its feature gate DRAExtendedResource is on, which no API tells"
	var f found
	note := func(nodes []string, format string) {
		if len(nodes) > 0 {
			f.notes = append(f.notes, fmt.Sprintf(format, strings.ToUpper(nodesText(nodes)[:1])+nodesText(nodes)[1:]))
		}
	}
	if running {
		note(old, "%s: the kubelet is older than 1.36 and starts such a pod without the devices that it is allocated"+gate+". Delete the pod, and upgrade the kubelet or use a claim.")
		note(unknown, "%s: the version of the kubelet cannot be read. One that is older than 1.36 starts such a pod without the devices that it is allocated.")
		return f
	}
	note(runs, "%s: the pod would run there without its devices, because the kubelet is older than 1.36"+gate+". Upgrade the kubelet, or use a claim.")
	note(old, "%s: not for pods that ask for extended resources, because the kubelet is older than 1.36. A claim can have devices there.")
	note(unknown, "%s: the version of the kubelet cannot be read, and whether such pods get their devices there is unknown.")
	return f
}
