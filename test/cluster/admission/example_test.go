// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/pod-security-admission/api"
)

// TestExample: an API server takes the example of the documentation, every label and every
// quota in it has a meaning, and no class of the chart is without a quota.
func TestExample(t *testing.T) {
	classes := map[string]bool{}
	for _, object := range chart(t, "defaults") {
		if class, is := object.(*resourcev1.DeviceClass); is {
			classes[class.Name] = false
		}
	}
	if len(classes) < 5 {
		t.Fatalf("the chart has the classes %v", classes)
	}
	kinds := 0
	for _, object := range objects(t, tenant) {
		kinds++
		switch object := object.(type) {
		case *corev1.Namespace:
			policy, errs := api.PolicyToEvaluate(object.Labels, api.Policy{})
			if len(errs) > 0 || policy.Enforce.Level != api.LevelRestricted {
				t.Errorf("the namespace enforces %v, %v", policy.Enforce, errs)
			}
		case *corev1.ResourceQuota:
			if errs := validation.ValidateResourceQuota(toInternal(t, object).(*core.ResourceQuota)); len(errs) > 0 {
				t.Error(errs.ToAggregate())
			}
			for name := range object.Spec.Hard {
				class, isClass := strings.CutSuffix(string(name), corev1.ResourceClaimsPerClass)
				_, known := classes[class]
				others := []string{"count/resourceclaims.resource.k8s.io", "requests.nvidia.com/gpu", "requests.nvidia.com/gpu.shared"}
				if isClass != known || !isClass && !slices.Contains(others, string(name)) {
					t.Errorf("a quota for %s, which the chart does not make", name)
				}
				classes[class] = true
			}
		default:
			t.Errorf("a %T", object)
		}
	}
	for class, has := range classes {
		if !has {
			t.Errorf("no quota for class %s", class)
		}
	}
	if kinds != 2 {
		t.Errorf("%d objects", kinds)
	}
}
