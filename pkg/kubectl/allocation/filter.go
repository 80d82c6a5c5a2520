// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"fmt"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
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

// NodeFilter knows how full nodes are, apart from devices, as far as pods could be read.
type NodeFilter struct {
	used map[string]corev1.ResourceList
	pods map[string]int64
	// most is "at most " where not all pods could be read.
	most string
}

// NewNodeFilter returns a filter for the nodes of a Snapshot.
func NewNodeFilter(s *fleet.Snapshot) *NodeFilter {
	f := &NodeFilter{used: map[string]corev1.ResourceList{}, pods: map[string]int64{}}
	if s.Hides(fleet.ResourcePods) {
		f.most = "at most "
	}
	for _, pod := range s.Pods {
		if pod.Spec.NodeName != "" && !fleet.Ended(pod) {
			f.Add(pod, pod.Spec.NodeName)
		}
	}
	return f
}

// Add takes a pod into account as if it were on a node.
func (f *NodeFilter) Add(pod *corev1.Pod, node string) {
	f.pods[node]++
	used := corev1.ResourceList{}
	maps.Copy(used, f.used[node])
	for name, amount := range PodRequests(pod) {
		amount.Add(used[name])
		used[name] = amount
	}
	f.used[node] = used
}

// Clone returns a filter to which pods can be added.
func (f *NodeFilter) Clone() *NodeFilter {
	return &NodeFilter{maps.Clone(f.used), maps.Clone(f.pods), f.most}
}

// Obstacles returns what keeps a pod off a node, apart from devices. Topology spread, affinity
// between pods, volumes and ports are not looked at; neither is what cannot be read of the node.
func (f *NodeFilter) Obstacles(c *Cluster, pod *corev1.Pod, node *corev1.Node) []Obstacle {
	var out []Obstacle
	add := func(kind ObstacleKind, format string, a ...any) {
		out = append(out, Obstacle{Kind: kind, Text: fmt.Sprintf(format, a...)})
	}
	if isForAnother(pod, node) {
		add(ByNodeName, "spec.nodeName is %s", pod.Spec.NodeName)
	}
	if c.Unread(node) {
		return out
	}
	cordon := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
	if node.Spec.Unschedulable && !tolerates(pod, &cordon) {
		add(ByCordon, "the node is unschedulable (cordoned)")
	}
	for _, text := range unselected(pod, node) {
		add(ByNodeSelector, "%s", text)
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
	for _, text := range f.lacks(c, pod, node) {
		add(ByNodeResources, "%s", text)
	}
	return out
}

// isForAnother reports whether a pod that does not run yet names another node.
func isForAnother(pod *corev1.Pod, node *corev1.Node) bool {
	return pod.Spec.NodeName != "" && pod.Spec.NodeName != node.Name && (pod.Status.Phase == "" || pod.Status.Phase == corev1.PodPending)
}

// unselected returns the labels that a pod's nodeSelector misses.
func unselected(pod *corev1.Pod, node *corev1.Node) []string {
	var out []string
	for _, key := range sets.List(sets.KeySet(pod.Spec.NodeSelector)) {
		want := pod.Spec.NodeSelector[key]
		switch has, set := node.Labels[key]; {
		case !set:
			out = append(out, fmt.Sprintf("nodeSelector wants %s=%s, the node has no label %s", key, want, key))
		case has != want:
			out = append(out, fmt.Sprintf("nodeSelector wants %s=%s, the node has %s=%s", key, want, key, has))
		}
	}
	return out
}

func tolerates(pod *corev1.Pod, t *corev1.Taint) bool {
	return corev1helpers.TolerationsTolerateTaint(klog.Background(), pod.Spec.Tolerations, t, false)
}

// lacks returns the resources of which a node has too little left. What classes provide is not
// among them, and neither is anything where the node says nothing about itself.
func (f *NodeFilter) lacks(c *Cluster, pod *corev1.Pod, node *corev1.Node) []string {
	if len(node.Status.Allocatable) == 0 || pod.Spec.NodeName == node.Name {
		return nil
	}
	var out []string
	requests := PodRequests(pod)
	for _, name := range sets.List(sets.KeySet(requests)) {
		want, has := requests[name], node.Status.Allocatable[name]
		if want.IsZero() || has.IsZero() && c.ExtendedClass(name) != nil {
			continue
		}
		free := has.DeepCopy()
		free.Sub(f.used[node.Name][name])
		if free.Cmp(want) < 0 {
			if free.Sign() < 0 {
				free.Set(0)
			}
			text := fmt.Sprintf("the pod wants %s %s, of the node's %s are %s%s left", want.String(), name, has.String(), f.most, free.String())
			out = append(out, text)
		}
	}
	if most, has := node.Status.Allocatable[corev1.ResourcePods]; has && f.pods[node.Name] >= most.Value() {
		out = append(out, fmt.Sprintf("the node runs %d pods already, which is its limit", f.pods[node.Name]))
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
