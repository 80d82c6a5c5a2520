// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Obstacle is something other than devices that keeps a pod off a node.
type Obstacle struct {
	// Kind is one of the constants below.
	Kind ObstacleKind
	// Text says it, as in "nodeSelector wants gpu=h100, the node has gpu=a100".
	Text string
}

// ObstacleKind is what keeps a pod off a node.
type ObstacleKind string

// The kinds of obstacles.
const (
	ByNodeName      ObstacleKind = "NodeName"
	ByCordon        ObstacleKind = "Unschedulable"
	ByNodeSelector  ObstacleKind = "NodeSelector"
	ByNodeAffinity  ObstacleKind = "NodeAffinity"
	ByNodeTaint     ObstacleKind = "NodeTaint"
	ByNodeResources ObstacleKind = "NodeResources"
)

// Obstacles returns what keeps a pod off a node, apart from devices. Topology spread, affinity
// between pods, volumes and ports are not looked at; neither is what cannot be read of the node.
func (p *Planner) Obstacles(pod *corev1.Pod, node *corev1.Node) []Obstacle {
	var out []Obstacle
	add := func(kind ObstacleKind, format string, a ...any) {
		out = append(out, Obstacle{Kind: kind, Text: fmt.Sprintf(format, a...)})
	}
	if isForAnother(pod, node) {
		add(ByNodeName, "spec.nodeName is %s", pod.Spec.NodeName)
	}
	if p.Cluster.Unread(node) {
		return out
	}
	cordon := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
	if node.Spec.Unschedulable && !tolerates(pod, &cordon) {
		add(ByCordon, "the node is unschedulable (cordoned)")
	}
	for _, key := range sets.List(sets.KeySet(pod.Spec.NodeSelector)) {
		if text := unselected(pod, node, key); text != "" {
			add(ByNodeSelector, "nodeSelector wants %s=%s, the node has %s", key, pod.Spec.NodeSelector[key], text)
		}
	}
	switch matches, err := nodeaffinity.NewRequiredNodeAffinity(nil, pod.Spec.Affinity).Match(node); {
	case err != nil:
		add(ByNodeAffinity, "the required node affinity is invalid: %v", err)
	case !matches:
		add(ByNodeAffinity, "the required node affinity does not match the node's labels")
	}
	for _, t := range node.Spec.Taints {
		if t.Effect == corev1.TaintEffectPreferNoSchedule || t.Key == corev1.TaintNodeUnschedulable || tolerates(pod, &t) {
			continue
		}
		add(ByNodeTaint, "the pod does not tolerate the node's taint %s", t.ToString())
	}
	for _, text := range p.lacks(pod, node) {
		add(ByNodeResources, "%s", text)
	}
	return out
}

// isForAnother reports whether a pod that does not run yet names another node.
func isForAnother(pod *corev1.Pod, node *corev1.Node) bool {
	return pod.Spec.NodeName != "" && pod.Spec.NodeName != node.Name && (pod.Status.Phase == "" || pod.Status.Phase == corev1.PodPending)
}

// unselected says what a node has instead of the label that a pod's nodeSelector wants, or nothing.
func unselected(pod *corev1.Pod, node *corev1.Node, key string) string {
	switch has, set := node.Labels[key]; {
	case !set:
		return "no label " + key
	case has != pod.Spec.NodeSelector[key]:
		return key + "=" + has
	}
	return ""
}

func tolerates(pod *corev1.Pod, t *corev1.Taint) bool {
	return corev1helpers.TolerationsTolerateTaint(klog.Background(), pod.Spec.Tolerations, t, false)
}

// lacks returns the resources of which a node has too little left. What classes provide is not
// among them, and neither is anything where the node says nothing about itself.
func (p *Planner) lacks(pod *corev1.Pod, node *corev1.Node) []string {
	if len(node.Status.Allocatable) == 0 || pod.Spec.NodeName == node.Name {
		return nil
	}
	var out []string
	requests, used := PodRequests(pod), p.used[node.Name]
	for _, name := range sets.List(sets.KeySet(requests)) {
		want, free := requests[name], node.Status.Allocatable[name].DeepCopy()
		if want.IsZero() || free.IsZero() && p.Cluster.extended.GetDeviceClass(name) != nil {
			continue
		}
		all := free.String()
		free.Sub(used[name])
		if free.Cmp(want) < 0 {
			if free.Sign() < 0 {
				free.Set(0)
			}
			out = append(out, fmt.Sprintf("the pod wants %s %s, of the node's %s are %s%s left", want.String(), name, all, p.Cluster.most, free.String()))
		}
	}
	runs := used[corev1.ResourcePods]
	if most, has := node.Status.Allocatable[corev1.ResourcePods]; has && runs.Cmp(most) >= 0 {
		out = append(out, fmt.Sprintf("the node runs %s pods already, which is its limit", runs.String()))
	}
	return out
}

// Summary joins the texts of obstacles.
func Summary(obstacles []Obstacle) string {
	var texts []string
	for _, o := range obstacles {
		texts = append(texts, o.Text)
	}
	return strings.Join(texts, "; ")
}
