// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
)

// The plugins' ServiceAccount, and so their place in the API server's queues.
const (
	namespace = "partage"
	account   = "gpu-kubelet-plugin"
)

// atOnce is how many nodes are made, started or looked at side by side.
const atOnce = 20

// pluginConfig makes the plugins' ServiceAccount, with the rights of the chart's that they need
// here, and returns a configuration with its token.
func pluginConfig(ctx context.Context, admin *rest.Config, client kubernetes.Interface) (*rest.Config, error) {
	meta := metav1.ObjectMeta{Name: account}
	rules := []rbacv1.PolicyRule{
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"}, Verbs: []string{"get", "list", "watch", "create", "update", "delete"}},
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
		{NonResourceURLs: []string{"/version"}, Verbs: []string{"get"}},
	}
	_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err == nil {
		_, err = client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: account},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("make the ServiceAccount of the plugins: %w", err)
	}
	token, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("make a token for the plugins: %w", err)
	}
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken = token.Status.Token
	return config, nil
}

// nodeName is that of a node which kwok plays.
func nodeName(i int) string { return fmt.Sprintf("gpu-%04d", i) }

// makeNodes makes Node objects for kwok and waits until they are ready.
func makeNodes(ctx context.Context, client kubernetes.Interface, count int) error {
	return forEach(ctx, count, func(ctx context.Context, i int) error {
		_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: nodeName(i), Annotations: map[string]string{"kwok.x-k8s.io/node": "fake"},
			Labels: map[string]string{"kubernetes.io/hostname": nodeName(i), "kubernetes.io/os": "linux", "type": "kwok"},
		}}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make node %s: %w", nodeName(i), err)
		}
		return nil
	})
}

// readyNodes counts them.
func readyNodes(ctx context.Context, client kubernetes.Interface) (int, error) {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: "type=kwok", ResourceVersion: "0"})
	if err != nil {
		return 0, fmt.Errorf("list the nodes: %w", err)
	}
	ready := 0
	for i := range list.Items {
		for _, c := range list.Items[i].Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				ready++
			}
		}
	}
	return ready, nil
}

// forEach calls f for the numbers up to count, several at a time, and returns the first error.
func forEach(ctx context.Context, count int, f func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	workqueue.ParallelizeUntil(ctx, atOnce, count, func(i int) {
		if err := f(ctx, i); err != nil {
			cancel(err)
		}
	})
	return context.Cause(ctx)
}

// sampled are the nodes whose slices are looked at.
func sampled(count int) []int {
	step := max(1, count/10)
	var some []int
	for i := 0; i < count; i += step {
		some = append(some, i)
	}
	return some
}

// check holds the slices of some nodes against what should be published.
func check(ctx context.Context, client kubernetes.Interface, nodes, gpus int, right func(d *resourceapi.Device) error) error {
	for _, i := range sampled(nodes) {
		list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName(i)})
		if err != nil {
			return fmt.Errorf("list the slices of node %s: %w", nodeName(i), err)
		}
		if len(list.Items) != gpus+1 {
			return fmt.Errorf("node %s has %d slices, want %d", nodeName(i), len(list.Items), gpus+1)
		}
		for j := range list.Items {
			for k := range list.Items[j].Spec.Devices {
				if err := right(&list.Items[j].Spec.Devices[k]); err != nil {
					return fmt.Errorf("node %s, device %s: %w", nodeName(i), list.Items[j].Spec.Devices[k].Name, err)
				}
			}
		}
	}
	return nil
}
