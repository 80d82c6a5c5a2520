// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
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
			level, errs := api.PolicyToEvaluate(object.Labels, api.Policy{})
			if len(errs) > 0 || level.Enforce.Level != api.LevelRestricted {
				t.Errorf("the namespace enforces %v, %v", level.Enforce, errs)
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

// TestTenantsOfMPS: each namespace of the example names a class of the example, which the
// chart's policy knows by the values in the example's text, and the classes select
// different GPUs.
func TestTenantsOfMPS(t *testing.T) {
	text, err := os.ReadFile(tenantsOfMPS)
	if err != nil {
		t.Fatal(err)
	}
	values, err := os.ReadFile("../../../deployments/helm/testdata/tenants-of-mps.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, values, _ = bytes.Cut(values, []byte("mpsNamespacePolicy:\n"))
	for line := range strings.Lines(string(values)) {
		if !strings.Contains(string(text), "#   "+line) {
			t.Errorf("the example does not say %q", line)
		}
	}
	classes, used := map[string]string{}, map[string]bool{}
	for _, object := range objects(t, tenantsOfMPS) {
		switch object := object.(type) {
		case *resourcev1.DeviceClass:
			if !strings.Contains(string(values), object.Name) {
				t.Errorf("the values lack class %s", object.Name)
			}
			for _, selector := range object.Spec.Selectors {
				classes[object.Name] += selector.CEL.Expression
			}
		case *corev1.Namespace:
			used[object.Labels["example.com/mps-class"]] = true
			if object.Labels["pod-security.kubernetes.io/enforce"] != string(api.LevelRestricted) {
				t.Errorf("namespace %s: %v", object.Name, object.Labels)
			}
		default:
			t.Errorf("a %T", object)
		}
	}
	for class := range used {
		if !strings.Contains(classes[class], "type == 'mps'") {
			t.Errorf("class %s selects %q", class, classes[class])
		}
	}
	if len(used) != 2 || len(classes) != 2 {
		t.Errorf("namespaces use %v of %v", used, classes)
	}
}

// TestRestricted: a namespace that enforces "restricted" takes the pods of all templates and of the examples for users.
func TestRestricted(t *testing.T) {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	restricted := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	refusal := func(pod *corev1.PodTemplateSpec) string {
		result := policy.AggregateCheckResults(evaluator.EvaluatePod(restricted, &pod.ObjectMeta, &pod.Spec))
		return result.ForbiddenDetail()
	}
	if refusal(&corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}}) == "" {
		t.Error("a pod without a securityContext is not refused")
	}
	pods := 0
	for _, pattern := range []string{templates + "/*.yaml", examples + "/*.yaml", examples + "/*/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			for _, pod := range podsOf(t, file) {
				pods++
				if why := refusal(&pod); why != "" {
					t.Errorf("%s: a namespace that enforces restricted refuses its pods: %s", file, why)
				}
				// Images whose user is root, or has a name only, do not start with runAsNonRoot alone.
				if context := pod.Spec.SecurityContext; context == nil || context.RunAsUser == nil {
					t.Errorf("%s: runAsUser is not set", file)
				}
			}
		}
	}
	if t.Logf("%d cases", pods); pods < 20 {
		t.Errorf("only %d pods", pods)
	}
}

// podsOf are the pods of a file, and what its workloads make pods of, those of kinds that are not known here included.
func podsOf(t *testing.T, file string) (all []corev1.PodTemplateSpec) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var walk func(value any)
	walk = func(value any) {
		switch value := value.(type) {
		case []any:
			for _, element := range value {
				walk(element)
			}
		case map[string]any:
			if spec, is := value["spec"].(map[string]any); !is || spec["containers"] == nil {
				for _, field := range value {
					walk(field)
				}
				return
			}
			var pod corev1.PodTemplateSpec
			document, err := yaml.Marshal(value)
			if err := errors.Join(err, yaml.Unmarshal(document, &pod)); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			all = append(all, pod)
		}
	}
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		var content any
		if err := yaml.Unmarshal([]byte(document), &content); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		walk(content)
	}
	return all
}
