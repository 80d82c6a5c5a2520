//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// asPlugin returns a client with the rights of the plugin's ServiceAccount, bound to a pod
// on a node.
func asPlugin(t *testing.T, serviceAccount, node string) kubernetes.Interface {
	t.Helper()
	config := rest.CopyConfig(restConfig)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: fmt.Sprintf("system:serviceaccount:%s:%s", driverNamespace, serviceAccount),
		Extra:    map[string][]string{"authentication.kubernetes.io/node-name": {node}},
	}
	plugin, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return plugin
}

// TestOwnEventsOnly checks that the plugin may report for its node, and only that. Package
// test/cluster/admission has all cases.
func TestOwnEventsOnly(t *testing.T) {
	t.Parallel()
	spec := driverPod(t, pluginComponent).Spec
	plugin := asPlugin(t, spec.ServiceAccountName, spec.NodeName)
	for name, tc := range map[string]struct {
		edit    func(*corev1.Event)
		allowed bool
	}{
		"own node":      {func(*corev1.Event) {}, true},
		"other node":    {func(e *corev1.Event) { e.InvolvedObject.Name = "another-node" }, false},
		"other host":    {func(e *corev1.Event) { e.ReportingInstance = "another-node" }, false},
		"the kubelet's": {func(e *corev1.Event) { e.ReportingController, e.Source.Component = "kubelet", "kubelet" }, false},
		"namespace":     {func(e *corev1.Event) { e.InvolvedObject.Kind, e.InvolvedObject.Name = "Namespace", "default" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := &corev1.Event{
				ObjectMeta:     metav1.ObjectMeta{GenerateName: "e2e-policy-"},
				InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: spec.NodeName},
				Type:           corev1.EventTypeNormal, Reason: "Test", Message: "a test",
				Source:              corev1.EventSource{Component: driverName, Host: spec.NodeName},
				ReportingController: driverName, ReportingInstance: spec.NodeName,
			}
			tc.edit(e)
			_, err := plugin.CoreV1().Events(metav1.NamespaceDefault).Create(t.Context(), e, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if tc.allowed {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			if !apierrors.IsForbidden(err) || !strings.Contains(fmt.Sprint(err), "ValidatingAdmissionPolicy") {
				t.Errorf("want a refusal by the admission policy, got %v", err)
			}
		})
	}
}

// TestOwnNodeOnly checks that the plugin's ServiceAccount, bound to a pod on one node, may write ResourceSlices of that node and of no
// other, and into the pool of that node only.
func TestOwnNodeOnly(t *testing.T) {
	t.Parallel()
	spec := driverPod(t, pluginComponent).Spec
	plugin := asPlugin(t, spec.ServiceAccountName, spec.NodeName)

	slice := func(edit func(*resourceapi.ResourceSliceSpec)) *resourceapi.ResourceSlice {
		s := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-policy-"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:   driverName,
				NodeName: ptr.To(spec.NodeName),
				Pool:     resourceapi.ResourcePool{Name: spec.NodeName, Generation: 1 << 40, ResourceSliceCount: 1},
				Devices:  []resourceapi.Device{{Name: "d"}},
			},
		}
		edit(&s.Spec)
		return s
	}
	for name, tc := range map[string]struct {
		edit    func(*resourceapi.ResourceSliceSpec)
		allowed bool
	}{
		"own node":     {func(*resourceapi.ResourceSliceSpec) {}, true},
		"other node":   {func(s *resourceapi.ResourceSliceSpec) { s.NodeName = ptr.To("another-node") }, false},
		"all nodes":    {func(s *resourceapi.ResourceSliceSpec) { s.NodeName = nil; s.AllNodes = ptr.To(true) }, false},
		"other pool":   {func(s *resourceapi.ResourceSliceSpec) { s.Pool.Name = "another-node" }, false},
		"other driver": {func(s *resourceapi.ResourceSliceSpec) { s.Driver = "tpu.example.com" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := plugin.ResourceV1().ResourceSlices().Create(t.Context(), slice(tc.edit), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if tc.allowed {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) || !strings.Contains(fmt.Sprint(err), "ValidatingAdmissionPolicy") {
				t.Errorf("want a refusal by the admission policy, got %v", err)
			}
		})
	}
	for name, allowed := range map[string]bool{
		"00000-" + driverName + "-" + spec.NodeName:         true,
		"00000-" + driverName + "-another-" + spec.NodeName: false,
		"a-name-of-no-node":                                 true,
	} {
		named := slice(func(*resourceapi.ResourceSliceSpec) {})
		named.GenerateName, named.Name = "", name
		_, err := plugin.ResourceV1().ResourceSlices().Create(t.Context(), named, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		// The slice of the node itself is there.
		if taken := err == nil || apierrors.IsAlreadyExists(err); taken != allowed {
			t.Errorf("name %s: %v", name, err)
		}
	}
}

// TestViewersSeeSlices checks that Kubernetes adds the chart's rules to the cluster roles for people.
func TestViewersSeeSlices(t *testing.T) {
	t.Parallel()
	for _, role := range []string{"view", "edit", "admin"} {
		eventually(t, "rules for resourceslices in the cluster role "+role, func(ctx context.Context) (bool, string) {
			r, err := client.RbacV1().ClusterRoles().Get(ctx, role, metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			return slices.ContainsFunc(r.Rules, func(rule rbacv1.PolicyRule) bool {
				return slices.Contains(rule.Resources, "resourceslices") && slices.Contains(rule.Verbs, "list") && !slices.Contains(rule.Verbs, "delete")
			}), ""
		})
	}
}
