// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

// nodeNamed is a node as it may be, with labels of several writers.
func nodeNamed(name string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: "uid-1", Annotations: map[string]string{"example.com/a": "b"},
			Labels: map[string]string{"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true", "nvidia.com/gpu.count": "4"},
		},
		Spec: corev1.NodeSpec{ProviderID: "example://1", Taints: []corev1.Taint{{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule}}},
	}
}

// TestNodeLabels: the plugin writes its labels of its node, and nothing else of any node.
func TestNodeLabels(t *testing.T) {
	server := newAPIServer(t, "node-labels")
	cases := 0
	for name, test := range map[string]struct {
		node string
		by   user.Info
		edit func(*corev1.Node)
		want string
	}{
		"nothing":        {edit: func(*corev1.Node) {}},
		"another value":  {edit: func(n *corev1.Node) { n.Labels["nvidia.com/gpu.count"] = "8" }},
		"removal":        {edit: func(n *corev1.Node) { delete(n.Labels, "nvidia.com/gpu.count") }},
		"who writes":     {edit: func(n *corev1.Node) { n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "partage-node-labels"}} }},
		"somebody else":  {edit: func(n *corev1.Node) { n.Spec.Unschedulable = true }, by: somebody},
		"no labels left": {edit: func(n *corev1.Node) { n.Labels = nil }, want: "may write the labels nvidia.com/gpu.compute.major, "},
		"all labels": {edit: func(n *corev1.Node) {
			for _, key := range []string{"product", "count", "memory", "family", "compute.major", "compute.minor"} {
				n.Labels["nvidia.com/gpu."+key] = "x"
			}
		}},
		"another label":           {edit: func(n *corev1.Node) { n.Labels["node-role.kubernetes.io/control-plane"] = "" }, want: "may write the labels"},
		"another label's value":   {edit: func(n *corev1.Node) { n.Labels["nvidia.com/gpu.present"] = "false" }, want: "may write the labels"},
		"another label's removal": {edit: func(n *corev1.Node) { delete(n.Labels, "kubernetes.io/os") }, want: "may write the labels"},
		"annotation":              {edit: func(n *corev1.Node) { n.Annotations["example.com/a"] = "c" }, want: "nothing else of it"},
		"annotations":             {edit: func(n *corev1.Node) { n.Annotations = nil }, want: "nothing else of it"},
		"finalizer":               {edit: func(n *corev1.Node) { n.Finalizers = []string{"example.com/f"} }, want: "nothing else of it"},
		"owner":                   {edit: func(n *corev1.Node) { n.OwnerReferences = []metav1.OwnerReference{{Name: "a"}} }, want: "nothing else of it"},
		"taint":                   {edit: func(n *corev1.Node) { n.Spec.Taints = nil }, want: "nothing else of it"},
		"cordon":                  {edit: func(n *corev1.Node) { n.Spec.Unschedulable = true }, want: "nothing else of it"},
		"status":                  {edit: func(n *corev1.Node) { n.Status.Phase = corev1.NodeTerminated }, want: "nothing else of it"},
		"another node":            {node: "node-2", edit: func(n *corev1.Node) { n.Labels["nvidia.com/gpu.count"] = "8" }, want: "may not write node node-2"},
		"by another node":         {by: pluginOn("node-2"), edit: func(n *corev1.Node) { n.Labels["nvidia.com/gpu.count"] = "8" }, want: "may not write node node-1"},
		"token without a pod":     {by: pluginOn(""), edit: func(n *corev1.Node) { n.Labels["nvidia.com/gpu.count"] = "8" }, want: "not bound to a pod"},
	} {
		cases++
		t.Run(name, func(t *testing.T) {
			if test.node == "" {
				test.node = ownNode
			}
			if test.by == nil {
				test.by = pluginOn(ownNode)
			}
			changed := nodeNamed(test.node)
			test.edit(changed)
			_, err := server.ask(t, request{by: test.by, operation: admission.Update, object: changed, old: nodeNamed(test.node)})
			check(t, err, test.want)
		})
	}
	if t.Logf("%d cases", cases); cases != 20 {
		t.Errorf("%d cases", cases)
	}
	for operation, r := range map[string]request{
		"create": {operation: admission.Create, object: nodeNamed(ownNode)},
		"delete": {operation: admission.Delete, old: nodeNamed(ownNode)},
	} {
		t.Run(operation, func(t *testing.T) {
			r.by = pluginOn(ownNode)
			_, err := server.ask(t, r)
			check(t, err, "neither create nor delete")
		})
	}
}

// TestRightToWriteNodes: the plugin may write nodes where it is to, and where the policy
// narrows that.
func TestRightToWriteNodes(t *testing.T) {
	for golden, want := range map[string]bool{"defaults": false, "everything": false, "node-labels": true} {
		may, narrowed := false, false
		for _, object := range chart(t, golden) {
			if role, is := object.(*rbacv1.ClusterRole); is {
				may = may || mayWriteNodes(role)
			}
		}
		for _, p := range policies(t, golden) {
			narrowed = narrowed || p.Name == "partage-own-node-labels"
		}
		if may != want || narrowed != want {
			t.Errorf("%s: the plugin may write nodes: %v, a policy narrows that: %v", golden, may, narrowed)
		}
	}
}

func mayWriteNodes(role *rbacv1.ClusterRole) bool {
	return slices.ContainsFunc(role.Rules, func(rule rbacv1.PolicyRule) bool {
		return slices.Contains(rule.Resources, "nodes") && !slices.Equal(rule.Verbs, []string{"get", "list", "watch"})
	})
}
