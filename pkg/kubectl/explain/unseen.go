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

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// hidden says of lists what their objects could contradict where they cannot be read.
var hidden = []struct {
	resource, text string
	// ofPods says that they concern pods only.
	ofPods bool
}{
	{fleet.ResourceClaims, "claims of other namespaces cannot be read: they may hold the devices", false},
	{fleet.ResourceTaintRules, "rules that taint devices cannot be read", false},
	{fleet.ResourceNodes, "nodes cannot be read: their labels and taints may keep the pod away", true},
	{fleet.ResourcePods, "pods of other namespaces cannot be read: nodes may have less CPU and memory left than it looks", true},
}

// hide adds the lists that cannot be read to what was not looked at.
func (q *inquiry) hide() {
	for _, h := range hidden {
		if q.model.Hides(h.resource) && (q.pod != nil || !h.ofPods) {
			q.Unseen = append(q.Unseen, h.text)
		}
	}
}

// settle makes a verdict unknown that something could contradict which was not looked at. What does not fit as far as can be seen does not
// fit, whatever else there is.
func (q *inquiry) settle() {
	if q.Verdict == Allocatable && len(q.Unseen) > 0 {
		q.Verdict, q.FitsOn = Unknown, nil
	}
}

// before puts a reason before all others, and what would help with it.
func (q *inquiry) before(r Reason, help ...Suggestion) {
	q.Verdict, q.FitsOn = Waits, nil
	q.Reasons = append([]Reason{r}, q.Reasons...)
	q.Suggestions = append(help, q.Suggestions...)
}

// outside looks at what keeps the pod waiting before its devices are looked for, or although they can be allocated.
func (q *inquiry) outside() {
	q.volumes()
	q.controllers()
	if q.Verdict == Allocatable {
		q.unexamined()
	}
	q.gated()
}

// volumes looks at the claims of the pod's volumes.
func (q *inquiry) volumes() {
	if q.Volume == nil {
		return
	}
	for i := range q.pod.Spec.Volumes {
		v := &q.pod.Spec.Volumes[i]
		if v.PersistentVolumeClaim == nil {
			continue
		}
		name := v.PersistentVolumeClaim.ClaimName
		switch is, doubt := q.Volume(q.pod.Namespace, name); {
		case doubt != "":
			q.Unseen = append(q.Unseen, fmt.Sprintf("PersistentVolumeClaim %s %s", name, doubt))
		case !is:
			q.before(Reason{
				Cause: VolumeMissing, Text: fmt.Sprintf("volume %s refers to PersistentVolumeClaim %s, which does not exist in namespace %s", v.Name, name, q.pod.Namespace),
			}, Suggestion{Kind: CreateObject, Text: fmt.Sprintf("with a PersistentVolumeClaim %s in namespace %s", name, q.pod.Namespace)})
		}
	}
}

// claimFailed is the reason of the event that says that a claim cannot be made of its template.
const claimFailed = "FailedResourceClaimCreation"

// controllers looks at what others than the scheduler and the kubelet say of a pod that is in the cluster. Events are asked for only where
// they could change the verdict.
func (q *inquiry) controllers() {
	unmade := slices.ContainsFunc(allocation.ClaimsOf(q.model.Snapshot, q.pod), func(c allocation.PodClaim) bool { return c.New })
	if q.Events == nil || q.pod.UID == "" || !unmade && q.Verdict != Allocatable {
		return
	}
	events, err := q.Events(q.pod, nil)
	if err != nil {
		q.Unseen = append(q.Unseen, fmt.Sprintf("events cannot be read: %v; they would say whether a quota, a webhook or a controller keeps the pod waiting", err))
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
				q.before(Reason{Cause: ClaimNotCreated, Text: "its claim cannot be created: " + e.Message}, q.quota(e.Message)...)
			}
		case e.Reason != "FailedScheduling" && who != corev1.DefaultSchedulerName && who != "kubelet":
			q.Unseen = append(q.Unseen, fmt.Sprintf("%s says of the pod: %s: %s", who, e.Reason, e.Message))
		}
		said[e.Reason] = true
	}
}

// quota says what helps where a quota is exceeded.
func (q *inquiry) quota(message string) []Suggestion {
	if !strings.Contains(message, "exceeded quota") {
		return nil
	}
	return []Suggestion{{Kind: RaiseQuota, Text: fmt.Sprintf("after claims of the namespace have ended, or with a larger quota: kubectl describe quota -n %s", q.pod.Namespace)}}
}

// unexamined adds the parts of the pod's spec that the scheduler looks at, and nothing here does.
func (q *inquiry) unexamined() {
	spec := &q.pod.Spec
	add := func(is bool, what string) {
		if is {
			q.Unseen = append(q.Unseen, what)
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
}

// unserved gives a reason for each extended resource that neither a class nor a device plugin provides: the pod waits for ever.
func (q *inquiry) unserved() {
	for _, name := range q.planner.Unserved(q.pod) {
		if q.model.Hides(fleet.ResourceNodes) || q.model.Hides(fleet.ResourceClasses) {
			q.Verdict = Unknown
			q.Unseen = append(q.Unseen, fmt.Sprintf("whether a node or a class provides %s", name))
			continue
		}
		r := Reason{Cause: ResourceUnserved, Text: fmt.Sprintf("the pod asks for %s, which no DeviceClass and no node provides", name)}
		profile, isPartition := strings.CutPrefix(string(name), "nvidia.com/mig-")
		profile = strings.TrimSuffix(profile, ".shared")
		switch near := nearest(string(name), q.extendedNames()); {
		case isPartition && q.planner.Class(migClass) != nil:
			q.before(r, Suggestion{Kind: UseClaim, Text: fmt.Sprintf("with a claim of class %s for profile %s instead, which kubectl gpu migrate pods writes", migClass, profile)})
		case near != "":
			q.before(r, Suggestion{Kind: ChangeReference, Text: fmt.Sprintf("with %s: did you mean that?", near)})
		default:
			q.before(r, Suggestion{Kind: UseClaim, Text: "with a claim instead of an extended resource, which kubectl gpu migrate pods writes"})
		}
	}
}

// migClass is the chart's class of partitions.
const migClass = "mig.nvidia.com"

// extendedNames returns the extended resources of classes.
func (q *inquiry) extendedNames() []string {
	var names []string
	for _, c := range q.model.Classes {
		if c.Spec.ExtendedResourceName != nil {
			names = append(names, *c.Spec.ExtendedResourceName)
		}
	}
	return names
}

// rollout says that the pod of a rolling update waits for what the pod before it has.
func (q *inquiry) rollout() {
	kind, name := fleet.OwnerOf(q.pod)
	if kind != "Deployment" {
		return
	}
	own := q.pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	for _, h := range q.InTheWay {
		for _, p := range q.model.Pods {
			k, n := fleet.OwnerOf(p)
			if p.Namespace != q.pod.Namespace || h.Namespace != p.Namespace || !slices.Contains(h.Pods, p.Name) || k != kind || n != name || p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] == own {
				continue
			}
			q.before(Reason{Cause: OwnPredecessor, Claim: h.Claim, Text: fmt.Sprintf(
				"deployment %s is being updated, and its new pod could use what its old pod %s has. Unless the strategy has maxUnavailable, that ends only when the new pod runs", name, p.Name)},
				Suggestion{Kind: ChangeStrategy, Text: fmt.Sprintf(
					`with maxSurge 0 and maxUnavailable 1: kubectl patch deployment -n %s %s -p '{"spec":{"strategy":{"rollingUpdate":{"maxSurge":0,"maxUnavailable":1}}}}'`, p.Namespace, name)})
			return
		}
	}
}

// priority says that a pod of priority has to wait all the same.
func (q *inquiry) priority() {
	if p := ptr.Deref(q.pod.Spec.Priority, 0); p > 0 && len(q.InTheWay) > 0 {
		q.Notes = append(q.Notes, fmt.Sprintf("The pod has priority %d, and still waits: the scheduler does not preempt pods for devices that their claims hold.", p))
	}
}
