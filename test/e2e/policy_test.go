//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// TestOwnNodeOnly checks that the plugin's ServiceAccount, bound to a pod on one node, may write ResourceSlices of that node and of no
// other.
func TestOwnNodeOnly(t *testing.T) {
	t.Parallel()
	spec := driverPod(t, pluginComponent).Spec

	asPlugin := rest.CopyConfig(restConfig)
	asPlugin.Impersonate = rest.ImpersonationConfig{
		UserName: fmt.Sprintf("system:serviceaccount:%s:%s", driverNamespace, spec.ServiceAccountName),
		Extra:    map[string][]string{"authentication.kubernetes.io/node-name": {spec.NodeName}},
	}
	plugin, err := kubernetes.NewForConfig(asPlugin)
	if err != nil {
		t.Fatal(err)
	}

	slice := func(edit func(*resourceapi.ResourceSliceSpec)) *resourceapi.ResourceSlice {
		s := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-policy-"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:   driverName,
				NodeName: ptr.To(spec.NodeName),
				Pool:     resourceapi.ResourcePool{Name: "e2e-policy", ResourceSliceCount: 1},
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
}
