// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// outside looks at what keeps a pod waiting although its devices can be allocated, or after they can be.
func outside(s *sight, w *workload) {
	kubelets(s)
	rollout(s, w)
	if p := ptr.Deref(s.pod.Spec.Priority, 0); p > 0 && len(s.InTheWay) > 0 {
		s.note("The pod has priority %d, and still waits: the scheduler does not preempt pods for devices that their claims hold.", p)
	}
	volumes(s)
	unstartable(s)
	controllers(s)
	if s.Verdict == Allocatable {
		unexamined(s)
	}
	gates(s)
}

const claimsHidden = "claims of other namespaces cannot be read: they may hold the devices"

// hidden finds the lists that cannot be read and whose objects could contradict what is seen.
func hidden(s *sight) {
	for _, h := range []struct {
		resource, text string
		// ofPods says that they concern pods only.
		ofPods bool
	}{
		{fleet.ResourceClaims, claimsHidden, false},
		{fleet.ResourceTaintRules, "rules that taint devices cannot be read", false},
		{fleet.ResourceNodes, "nodes cannot be read: their labels and taints may keep the pod away", true},
		{fleet.ResourcePods, "pods of other namespaces cannot be read: nodes may have less CPU and memory left than it looks", true},
	} {
		if s.x.model.Hides(h.resource) && (s.pod != nil || !h.ofPods) {
			s.addUnseen("%s", h.text)
		}
	}
}

// volumes looks at the claims of the pod's volumes.
func volumes(s *sight) {
	for i := range s.pod.Spec.Volumes {
		v := &s.pod.Spec.Volumes[i]
		if s.x.Volume == nil || v.PersistentVolumeClaim == nil && v.Ephemeral == nil {
			continue
		}
		name, ns := s.pod.Name+"-"+v.Name, s.pod.Namespace
		if v.PersistentVolumeClaim != nil {
			name = v.PersistentVolumeClaim.ClaimName
		}
		is, unseen := false, ""
		if v.Ephemeral == nil || s.pod.UID != "" {
			is, unseen = s.x.Volume(ns, name)
		}
		switch {
		case unseen != "":
			s.addUnseen("PersistentVolumeClaim %s %s", name, unseen)
		case !is && v.Ephemeral != nil:
			s.addUnseen("volume %s is made for the pod, and whether there is storage for it is not looked at", v.Name)
		case !is:
			s.because(Reason{Cause: VolumeMissing, help: []Suggestion{suggest(CreateObject, "with a PersistentVolumeClaim %s in namespace %s", name, ns)}},
				"volume %s refers to PersistentVolumeClaim %s, which does not exist in namespace %s", v.Name, name, ns)
		}
	}
}

// unstartable finds what keeps the pod from starting after it has its devices.
func unstartable(s *sight) {
	causes := foreseen(s, s.planned)
	if s.pod.Spec.NodeName != "" {
		causes = append(causes, (&stuck.Input{Pod: s.pod, Claims: s.wanted(s.x.model.Node(s.pod.Spec.NodeName))}).Unallocated()...)
	}
	for _, c := range causes {
		s.because(Reason{Cause: CannotStart, help: []Suggestion{suggest(ChangePod, "%s", c.Remedy)}}, "%s", c.Text)
	}
	spec, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&s.pod.Spec)
	if err != nil || s.x.Exists == nil {
		return // a pod that was decoded can be encoded
	}
	named := objectsIn(spec)
	for i, o := range named {
		if slices.Contains(named[:i], o) {
			continue
		}
		switch is, err := s.x.Exists(o.kind, s.pod.Namespace, o.name); {
		case err != nil:
			s.note("Whether %s %s exists is unknown: %v", o.kind, o.name, err)
		case !is:
			help := suggest(CreateObject, "with a %s %s in namespace %s", o.kind, o.name, s.pod.Namespace)
			s.because(Reason{Cause: CannotStart, help: []Suggestion{help}}, "the pod refers to %s %s, which does not exist in namespace %s",
				o.kind, o.name, s.pod.Namespace)
		}
	}
}

// object is a ConfigMap or a Secret.
type object struct{ kind, name string }

// naming are the fields of a pod's spec that name a ConfigMap or a Secret.
var naming = map[string]string{
	"configMap": kindConfigMap, "configMapRef": kindConfigMap, "configMapKeyRef": kindConfigMap,
	"secret": kindSecret, "secretRef": kindSecret, "secretKeyRef": kindSecret,
}

// objectsIn returns the ConfigMaps and Secrets without which a pod does not start, but for the one that Kubernetes makes in each namespace.
func objectsIn(value any) []object {
	var out []object
	switch v := value.(type) {
	case []any:
		for _, one := range v {
			out = append(out, objectsIn(one)...)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			of, _ := v[key].(map[string]any)
			name, _ := cmp.Or(of["name"], of["secretName"]).(string)
			if kind := naming[key]; kind != "" && name != "" && name != "kube-root-ca.crt" && of["optional"] != true {
				out = append(out, object{kind, name})
			}
			out = append(out, objectsIn(v[key])...)
		}
	}
	return out
}

// claimFailed is the reason of the event that says that a claim cannot be made of its template.
const claimFailed = "FailedResourceClaimCreation"

// controllers looks at what others than the scheduler and the kubelet say of a pod that is in the cluster. Events are asked for only where
// they could change the verdict: where it would fit, or a claim has not been made of its template.
func controllers(s *sight) {
	unmade := slices.ContainsFunc(s.references, func(c allocation.PodClaim) bool { return c.New })
	if s.x.Events == nil || s.pod.UID == "" || !unmade && s.Verdict != Allocatable {
		return
	}
	events, err := s.x.Events(s.pod, nil)
	if err != nil {
		s.addUnseen("events cannot be read: %v; they would say whether a quota, a webhook or a controller keeps the pod waiting", err)
	}
	said := map[string]bool{}
	for i := range slices.Backward(events) {
		e := &events[i]
		who := cmp.Or(e.ReportingController, e.Source.Component, "somebody")
		switch {
		case e.Type != corev1.EventTypeWarning || said[e.Reason]:
			continue
		case e.Reason == claimFailed:
			if !unmade {
				break
			}
			s.notCreated(ClaimNotCreated, "its claim cannot be created: "+e.Message)
		case e.Reason != "FailedScheduling" && who != corev1.DefaultSchedulerName && who != "kubelet":
			s.addUnseen("%s says of the pod: %s: %s", who, e.Reason, e.Message)
		}
		said[e.Reason] = true
	}
}

// exceeded is what the API server says of a quota.
const exceeded = "exceeded quota"

// notCreated says that an object cannot be made which is waited for.
func (e *Explanation) notCreated(cause Cause, why string) {
	r := Reason{Cause: cause}
	if strings.Contains(why, exceeded) {
		help := "after something in the namespace has ended, or with a larger quota"
		if exceedsAlone(why) {
			help = "with a larger quota, or with less: the request alone exceeds it"
		}
		r.help = []Suggestion{suggest(RaiseQuota, "%s: kubectl describe quota -n %s", help, e.Subject.Namespace)}
	}
	e.because(r, "%s", why)
}

// amounts are what the API server says of a quota that is exceeded: lists of NAME=AMOUNT.
var amounts = regexp.MustCompile(`, requested: (\S+), used: \S+, limited: (\S+)`)

// exceedsAlone reports whether more is requested than a quota allows, whatever else there is.
func exceedsAlone(why string) bool {
	lists := amounts.FindStringSubmatch(why)
	if lists == nil {
		return false
	}
	limits := strings.Split(lists[2], ",")
	return slices.ContainsFunc(strings.Split(lists[1], ","), func(requested string) bool {
		name, amount, _ := strings.Cut(requested, "=")
		at := slices.IndexFunc(limits, func(l string) bool { return strings.HasPrefix(l, name+"=") })
		if at < 0 {
			return false
		}
		wanted, err := resource.ParseQuantity(amount)
		limit, errLimit := resource.ParseQuantity(limits[at][len(name)+1:])
		return err == nil && errLimit == nil && wanted.Cmp(limit) > 0
	})
}

// unexamined finds the parts of the pod's spec that the scheduler looks at, and nothing here does.
func unexamined(s *sight) {
	spec := &s.pod.Spec
	affinity := ptr.Deref(spec.Affinity, corev1.Affinity{})
	if len(ptr.Deref(affinity.PodAffinity, corev1.PodAffinity{}).RequiredDuringSchedulingIgnoredDuringExecution) > 0 ||
		len(ptr.Deref(affinity.PodAntiAffinity, corev1.PodAntiAffinity{}).RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
		s.addUnseen("required affinity between pods is not looked at")
	}
	if slices.ContainsFunc(spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable != corev1.ScheduleAnyway }) {
		s.addUnseen("topology spread constraints are not looked at")
	}
	if slices.ContainsFunc(slices.Concat(spec.InitContainers, spec.Containers), func(c corev1.Container) bool {
		return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.HostPort != 0 })
	}) {
		s.addUnseen("ports of the node are not looked at")
	}
	if spec.SchedulerName != "" && spec.SchedulerName != corev1.DefaultSchedulerName {
		s.addUnseen("scheduler %s decides, which may have rules of its own", spec.SchedulerName)
	}
}

// gates finds that the scheduler does not look at the pod, whatever there is.
func gates(s *sight) {
	var all []string
	for _, gate := range s.pod.Spec.SchedulingGates {
		all = append(all, gate.Name)
	}
	if text := strings.Join(all, ", "); len(all) > 0 {
		s.because(Reason{Cause: Gated, help: []Suggestion{suggest(RemoveGates, "after the scheduling gates have been removed by what set them: %s", text)}},
			"the pod has scheduling gates, and the scheduler does not look at it until they are removed: %s", text)
	}
}

// migClass is the chart's class of partitions.
const migClass = "mig.nvidia.com"

// unserved finds extended resources that neither a class nor a device plugin provides: the pod waits for ever.
func unserved(s *sight) {
	offered := slices.Sorted(maps.Keys(s.x.model.ByExtendedResource()))
	for _, name := range s.x.planner.Cluster.Unserved(s.pod) {
		if s.x.model.Hides(fleet.ResourceNodes) || s.x.model.Hides(fleet.ResourceClasses) {
			s.addUnseen("whether a node or a class provides %s", name)
			continue
		}
		text, help := "", []Suggestion{suggest(UseClaim, "with a claim instead of an extended resource, which kubectl gpu migrate pods writes")}
		absent, install := s.x.absent()
		profile, isPartition := strings.CutPrefix(string(name), "nvidia.com/mig-")
		switch near := nearest(string(name), offered); {
		case absent != "" && isOurs(string(name)):
			text, help = ": "+absent, install
		case absent != "" && near == "":
			help = nil
		case isPartition && s.x.planner.Cluster.Class(migClass) != nil:
			help = []Suggestion{suggest(UseClaim, "with a claim of class %s for profile %s instead, which kubectl gpu migrate pods writes",
				migClass, strings.TrimSuffix(profile, ".shared"))}
		case near != "":
			help = []Suggestion{suggest(ChangeReference, "with %s: did you mean that?", near)}
		}
		s.because(Reason{Cause: ResourceUnserved, help: help}, "the pod asks for %s, which no DeviceClass and no node provides%s", name, text)
	}
}

// rollout finds that the pod of a rolling update waits for what the pod before it has.
func rollout(s *sight, w *workload) {
	kind, name := fleet.OwnerOf(s.pod)
	// What a file adds to pods of the same template is not after them.
	if kind != "Deployment" || w.same && s.pod.UID == "" {
		return
	}
	hash := func(p *corev1.Pod) string { return p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] }
	for _, h := range s.InTheWay {
		for _, p := range s.x.model.Pods {
			if !is(p, kind, name) || p.Namespace != s.pod.Namespace || h.Namespace != p.Namespace || !slices.Contains(h.Pods, p.Name) || hash(p) == hash(s.pod) {
				continue
			}
			first := max(w.wanted, 1)
			const patch = `{"spec":{"strategy":{"rollingUpdate":{"maxSurge":0,"maxUnavailable":%d}}}}`
			help := suggest(ChangeStrategy, "with maxSurge 0 and maxUnavailable %d: kubectl patch deployment -n %s %s -p '"+patch+"'",
				first, p.Namespace, name, first)
			s.because(Reason{Cause: OwnPredecessor, Claim: h.Claim, help: []Suggestion{help}},
				"a new pod of deployment %s could use what its old pod %s has. Unless the strategy has maxUnavailable %d, that ends only when "+
					"new pods run", name, p.Name, first)
			return
		}
	}
}

// judgedHere finds in the scheduler's words what is looked at here, too.
var judgedHere = regexp.MustCompile("(resource|all )claim|Insufficient |taint|unschedulable|affinity/selector|Too many pods")

// schedulerSays takes the scheduler's own last word into account. It knows what may not be read, and looks at more than is looked at here:
// where nothing else says that the pod waits, and that word is not about what may have changed since, it decides.
func schedulerSays(s *sight) {
	c := fleet.Condition(s.pod, corev1.PodScheduled)
	if c.Status != corev1.ConditionFalse || c.Message == "" {
		return
	}
	words, _, _ := strings.Cut(c.Message, ". ") // what comes then is about preemption
	_, words, _ = strings.Cut(words, ": ")
	other := slices.ContainsFunc(strings.Split(words, ", "), func(part string) bool { return !judgedHere.MatchString(part) })
	if s.Verdict == Waits || s.Verdict == Allocatable && len(s.Unseen) == 0 && !other {
		if s.note("The scheduler said: %s", c.Message); s.Verdict == Allocatable {
			s.note("Its devices could be allocated now. If it still waits in five minutes, the scheduler sees something that is not looked at here.")
		}
		return
	}
	since := ""
	if !c.LastTransitionTime.IsZero() {
		since = " for " + printer.Age(s.x.now.Sub(c.LastTransitionTime.Time))
	}
	s.because(Reason{Cause: NotScheduled}, "the scheduler has said%s: %s", since, c.Message)
}

// kubelets notes on which nodes a pod that asks for extended resources does not get devices, because the kubelet does not know
// that these can be devices. The scheduler does not look at that.
func kubelets(s *sight) {
	running := scheduled(s.pod)
	if running && s.pod.Status.ExtendedResourceClaimStatus == nil || !running && s.extended(nil) == nil {
		return
	}
	var old, unknown []string
	for _, n := range s.x.planner.Cluster.Nodes {
		hasGPUs := slices.ContainsFunc(s.x.model.Nodes, func(of *fleet.Node) bool { return of.Name == n.Name })
		if running && n.Name != s.pod.Spec.NodeName || !hasGPUs {
			continue
		}
		if knows, err := device.KnowsExtendedResources(n.Status.NodeInfo.KubeletVersion); err != nil {
			unknown = append(unknown, n.Name)
		} else if !knows {
			old = append(old, n.Name)
		}
	}
	const without = " starts pods that ask for extended resources without the devices that they are allocated"
	if len(old) > 0 {
		s.note("On %s the kubelet is older than 1.36 and%s, unless its feature gate DRAExtendedResource is on, which no API tells. Upgrade it, or use a claim.", nodesText(old), without)
	}
	if len(unknown) > 0 {
		s.note("On %s the version of the kubelet cannot be read. One that is older than 1.36%s.", nodesText(unknown), without)
	}
}
