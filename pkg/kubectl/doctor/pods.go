// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// checksWithoutDriver are those that mean something where no driver is installed.
var checksWithoutDriver = []Check{
	{ID: "driver-daemonset", Title: "the driver is installed", run: driverInstalled},
	{ID: "leftovers", Title: "the driver has left nothing", needs: []string{slicesOf, claims, nodes}, parts: []string{claims, nodes}, run: leftovers},
	{ID: "claimed-classes", Title: "nothing asks for classes that do not exist", needs: []string{classes, claims, templates}, parts: []string{claims, templates}, run: claimedClasses},
}

// uninstalled reports whether it is known that no driver is installed. DaemonSets that are called like the driver's prove nothing
// where nobody says which namespace is the driver's.
func (f *Facts) uninstalled() bool {
	if f.Lacks(daemonSets, "") || f.Lacks(classes, "") {
		return false
	}
	return !slices.ContainsFunc(f.DaemonSets, func(s *appsv1.DaemonSet) bool {
		return isPlugin(s) && (f.namespace == "" || s.Namespace == f.namespace)
	})
}

func driverInstalled(f *Facts) (found findings) {
	sets := f.driverSets()
	left := f.nodePods(func(p *corev1.Pod) bool {
		return hasComponent(pluginLabel)(p) && (f.namespace == "" || p.Namespace == f.namespace)
	})
	switch none := ": no DaemonSet has the label " + componentLabel + "=" + pluginLabel; {
	case len(sets) > 0:
	case len(left) > 0:
		for _, p := range left {
			found.add(Error, "The driver is being uninstalled: its DaemonSet is gone, or is being deleted, and its pods have not ended yet",
				"Wait until they are gone. Those that have not ended after a minute belong to nobody: delete them", refTo("pod", p))
		}
	case len(leftovers(f)) > 0:
		found.add(Error, "The driver is not installed any more, and has left something behind"+none,
			"If it was uninstalled a moment ago, wait and ask again. See leftovers for what to delete if it stays")
	case f.Hides(pods):
		found.add(Error, "The driver is not installed"+none,
			"Pods of all namespaces could not be read: if it was uninstalled a moment ago, its pods may not have ended yet. To have it, "+
				"helm install it when they are gone (docs/how-to/install.md)")
	default:
		found.add(Error, "The driver is not installed"+none,
			"To have it, helm install partage deployments/helm/partage --namespace partage (docs/how-to/install.md)")
	}
	for _, s := range sets {
		if s.Status.ObservedGeneration >= s.Generation && s.Status.DesiredNumberScheduled == 0 {
			found.add(Error, "No node is chosen by the driver's DaemonSet",
				"Compare its nodeSelector and affinity with the labels of your nodes: kubeletPlugin.gpuNodesOnly needs one of "+strings.Join(gpuLabels, ", "),
				refTo("daemonset", s))
		}
	}
	return found
}

// leftovers are what an uninstallation leaves where it was forced, or has just ended. Devices that another driver with this name has named are
// in good hands.
func leftovers(f *Facts) (found findings) {
	for _, c := range f.Claims {
		switch {
		case !slices.ContainsFunc(f.Holdings, func(h *fleet.Holding) bool { return h.Claim == c && device.IsName(h.Result.Device) }):
		case len(c.Status.ReservedFor) > 0:
			found.add(Error, "It has devices of the driver, which is gone. Its pods run on, and stay in Terminating when they are deleted",
				"Install the driver again, delete the pods, and uninstall it when they are gone (docs/how-to/uninstall.md)", refTo("resourceclaim", c))
		default:
			found.add(Warning, "It has devices of the driver, which is gone, and no pod uses it", "Delete it", refTo("resourceclaim", c))
		}
	}
	left := map[string]bool{}
	for d := range f.Devices() {
		left[d.GPU.Node.Name] = left[d.GPU.Node.Name] || device.IsName(d.Name)
	}
	for _, n := range f.Nodes {
		if !left[n.Name] {
			continue
		}
		found.add(Warning, "It still has ResourceSlices of the driver", "Wait a minute: the kubelet removes them. If they stay, kubectl delete resourceslices --field-selector spec.driver="+f.Driver+",spec.nodeName=NODE", nodeRef(n.Name))
	}
	for _, n := range f.Snapshot.Nodes {
		if n.Annotations[api.CordonAnnotation] != "" {
			found.add(Warning, "It still has the annotation "+api.CordonAnnotation+": if the driver comes back, it keeps pods away from these GPUs",
				"kubectl annotate node NODE "+api.CordonAnnotation+"-", nodeRef(n.Name))
		}
	}
	return found
}

func driverOnEveryNode(f *Facts) (found findings) {
	have := byNode(f.driverPods(pluginLabel))
	for _, n := range f.Snapshot.Nodes {
		if len(have[n.Name]) > 0 || virtual(n) || f.pausedByOperator(n.Name) {
			continue
		}
		switch {
		case f.publishes(n.Name):
			found.add(Error, "The node has devices of the driver, and no pod of it: pods with claims neither start nor end there",
				"See why the DaemonSet makes no pod for the node: its nodeSelector, affinity and tolerations", nodeRef(n.Name))
		case hasGPULabel(n):
			found.add(Error, "The node has GPUs, as its labels say, and no pod of the driver",
				"See why the DaemonSet makes no pod for the node: its nodeSelector, affinity and tolerations", nodeRef(n.Name))
		}
	}
	return found
}

// virtual reports whether no machine is behind a node. The chart keeps off those.
func virtual(n *corev1.Node) bool {
	kind := n.Labels["type"]
	return kind == "virtual-kubelet" || kind == "kwok" || n.Labels["eks.amazonaws.com/compute-type"] == "fargate"
}

// graceToStart is how long a pod may take to be ready before that is a finding.
const graceToStart = 2 * time.Minute

// notReady finds which pods of a component are not ready, and why.
func notReady(f *Facts, component string) (found findings) {
	for _, p := range f.driverPods(component) {
		if !fleet.Ready(p) && p.DeletionTimestamp == nil {
			whyNotReady(&found, f, p)
		}
	}
	return found
}

func whyNotReady(found *findings, f *Facts, p *corev1.Pod) {
	var since *metav1.Time
	if c := fleet.Condition(p, corev1.PodReady); !c.LastTransitionTime.IsZero() {
		since = &c.LastTransitionTime
	}
	add := func(s Severity, message, remedy string) { found.addSince(since, s, message, remedy, refTo("pod", p)) }
	logs := fmt.Sprintf("kubectl logs --namespace %s %s", p.Namespace, p.Name)
	for _, c := range p.Status.ContainerStatuses {
		w := c.State.Waiting
		switch {
		case w == nil:
		case w.Reason == "CrashLoopBackOff":
			add(Error, "It ends again and again"+lastWords(c), "Read the end of its log: "+logs+" --previous")
			return
		case strings.Contains(w.Reason, "Image"):
			add(Error, fmt.Sprintf("Its image %s cannot be pulled: %s", quote.Name(c.Image), w.Reason),
				"Check image.repository, image.tag or image.digest and imagePullSecrets of the chart; kubectl describe pod says what the registry answered")
			return
		case w.Reason != "ContainerCreating" && w.Reason != "PodInitializing":
			add(Error, fmt.Sprintf("Its container does not start: %s: %s", w.Reason, said(w.Message)), "kubectl describe pod has the details")
			return
		}
	}
	if p.Spec.NodeName == "" {
		add(Error, "It was not scheduled"+more(fleet.Condition(p, corev1.PodScheduled).Message),
			"Make room on the node, or let the pod go first: kubeletPlugin.priorityClassName")
		return
	}
	if f.Now.Sub(p.CreationTimestamp.Time) < graceToStart {
		add(Warning, "It has just been made, and is not ready yet", "Wait, and ask again")
		return
	}
	add(Error, "It is not ready"+more(probeFailure(f, p)),
		"Its event Unhealthy and the end of its log say why: most often the NVIDIA driver of the node is not loaded, "+
			"or the API server does not take its ResourceSlices; "+logs)
}

// lastWords says how a container has ended.
func lastWords(c corev1.ContainerStatus) string {
	t := c.LastTerminationState.Terminated
	if t == nil {
		return ""
	}
	text := fmt.Sprintf(", with exit code %d", t.ExitCode)
	if t.Reason != "" && t.Reason != "Error" {
		text += " (" + t.Reason + ")"
	}
	return text + more(lastLine(t.Message))
}

// more adds what others said, if they did.
func more(text string) string {
	if text == "" {
		return ""
	}
	return ": " + said(text)
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// probeFailure returns what the newest failed readiness probe said.
func probeFailure(f *Facts, p *corev1.Pod) string {
	for _, e := range newestFirst(f.Events) {
		if e.Reason == "Unhealthy" && e.InvolvedObject.UID == p.UID && f.recent(e) {
			return lastLine(e.Message)
		}
	}
	return ""
}

// manyRestarts is how often a container may have started anew while the last time is not long ago.
const manyRestarts = 3

func driverRestarts(f *Facts) (found findings) {
	for _, component := range []string{pluginLabel, supervisor} {
		for _, p := range f.driverPods(component) {
			for _, c := range p.Status.ContainerStatuses {
				t := c.LastTerminationState.Terminated
				if t == nil || c.RestartCount < manyRestarts || f.Now.Sub(t.FinishedAt.Time) > recentTime || c.State.Waiting != nil {
					continue
				}
				found.add(Warning, fmt.Sprintf("It has restarted %d times, the last time within an hour%s", c.RestartCount, lastWords(c)),
					fmt.Sprintf("Read the end of its log: kubectl logs --namespace %s %s --previous", p.Namespace, p.Name), refTo("pod", p))
			}
		}
	}
	return found
}

func pluginsReady(f *Facts) findings { return notReady(f, pluginLabel) }

func supervisorsReady(f *Facts) (found findings) {
	have := byNode(f.driverPods(supervisor))
	for d := range f.Devices() {
		if n := d.GPU.Node.Name; d.Type == fleet.TypeMPS && n != "" && len(have[n]) == 0 && !f.pausedByOperator(n) {
			found.add(Error, "The node offers MPS shares, and has no pod of the MPS supervisor",
				"Set mpsSupervisor.enabled=true in the chart, or offer no mps in the sharing policy", nodeRef(n))
		}
	}
	return append(found, notReady(f, supervisor)...)
}
