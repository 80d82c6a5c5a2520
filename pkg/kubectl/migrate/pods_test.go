// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// podTest is a stream of objects, and what their claims get.
type podTest struct {
	name string
	args []string
	// policy is what GPUs are offered as, "" for everything.
	policy string
	boards []string
	// claims are what a claim of each template gets on an empty node, by request.
	claims map[string]string
}

var podTests = []podTest{
	{
		"pods-deployment", []string{"testdata/pods/deployment.yaml"}, "", []string{"t4", "a100-80"},
		map[string]string{"models/search-gpu": "gpu " + a100},
	},
	{
		"pods-containers", []string{"testdata/pods/containers.yaml"}, "", []string{"t4", "t4", "t4", "l4", "l4", "a10", "h100-80-sxm"},
		map[string]string{"/train-gpu": "mig 1g.10gb " + h100 + ", gpu " + t4 + ", gpu " + t4 + ", gpu " + t4 + ", gpu " + l4 + ", gpu " + l4 + ", gpu NVIDIA A10"},
	},
	{
		"pods-affinity", []string{"testdata/pods/affinity.yaml"}, "", []string{"t4", "l4", "h100-80-sxm"},
		map[string]string{"/notebooks-gpu": "gpu " + l4, "/nightly-gpu": "gpu " + t4},
	},
	{
		"pods-shares", []string{"testdata/pods/shares.yaml"}, "default: {mig: {variants: true}}", []string{"t4", "l4", "a100-80-mig"},
		map[string]string{
			"/shared-gpu": "timeslice " + t4, "/agents-gpu": "mps " + t4,
			"/single-gpu": "mig 1g.10gb " + a100, "other/single-gpu": "mig 1g.10gb+me " + a100,
		},
	},
	{
		"pods-as-shares", []string{"testdata/pods/shares.yaml", "--gpu=mps", "--gpu-shared=mps"}, "default: {mig: {variants: true}}", []string{"t4", "l4", "a100-80-mig"},
		map[string]string{
			"/shared-gpu": "mps " + t4, "/agents-gpu": "mps " + t4,
			"/single-gpu": "mig 1g.10gb " + a100, "other/single-gpu": "mig 1g.10gb+me " + a100,
		},
	},
	{
		"pods-as-partitions", []string{"testdata/pods/deployment.yaml", "--gpu=1g.10gb"}, "", []string{"h100-80-sxm", "a100-80-mig"},
		map[string]string{"models/search-gpu": "mig 1g.10gb " + a100},
	},
	{"pods-others", []string{"testdata/pods/others.yaml"}, "", []string{"t4"}, map[string]string{}},
	{
		"pods-list", []string{"testdata/pods/list.json"}, "", []string{"t4"},
		map[string]string{"team/one-gpu": "gpu " + t4},
	},
	{
		"pods-without-extended", []string{"testdata/pods/extended.yaml"}, "", []string{"h100-80-sxm", "t4"},
		map[string]string{"/product-gpu": "gpu " + t4, "/whole-gpu": "gpu " + h100, "/partition-gpu": "mig 1g.10gb " + h100 + ", timeslice " + t4},
	},
}

// TestPods translates each stream, decodes the result strictly, checks that pods, containers
// and claims fit together, and has the scheduler's allocator allocate the claims.
func TestPods(t *testing.T) {
	for _, test := range podTests {
		t.Run(test.name, func(t *testing.T) {
			out := mustRun(t, append([]string{"pods"}, test.args...)...)
			golden(t, test.name+".yaml", out)
			policyFile := "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n" + test.policy
			templates := map[string]*resourceapi.ResourceClaimTemplate{}
			got := map[string]string{}
			for _, text := range documents(t, []byte(out)) {
				template := decodeAs[resourceapi.ResourceClaimTemplate](t, text, "ResourceClaimTemplate")
				if template == nil {
					checkWorkload(t, text, templates)
					continue
				}
				name := template.Namespace + "/" + template.Name
				if templates[name] != nil {
					t.Errorf("%s is there twice", name)
				}
				templates[name] = template
				spec := *template.Spec.Spec.DeepCopy()
				got[name] = strings.Join(newCluster(t, []byte(policyFile), test.boards...).allocate(t, spec), ", ")
			}
			if diff := cmp.Diff(test.claims, got); diff != "" {
				t.Errorf("claims get (-want +got):\n%s", diff)
			}
			// What is translated is left alone.
			again, _, err := run(t, out, "pods", "-")
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(again, "objects changed: 0\n") {
				t.Errorf("translated again, it changes:\n%s", again)
			}
		})
	}
}

// podSpecOf decodes strictly what has pods, and returns their spec.
func podSpecOf(t *testing.T, text []byte) (namespace string, spec *corev1.PodSpec) {
	t.Helper()
	if o := decodeAs[corev1.Pod](t, text, "Pod"); o != nil {
		return o.Namespace, &o.Spec
	}
	if o := decodeAs[appsv1.Deployment](t, text, "Deployment"); o != nil {
		return o.Namespace, &o.Spec.Template.Spec
	}
	if o := decodeAs[appsv1.StatefulSet](t, text, "StatefulSet"); o != nil {
		return o.Namespace, &o.Spec.Template.Spec
	}
	if o := decodeAs[appsv1.DaemonSet](t, text, "DaemonSet"); o != nil {
		return o.Namespace, &o.Spec.Template.Spec
	}
	if o := decodeAs[batchv1.Job](t, text, "Job"); o != nil {
		return o.Namespace, &o.Spec.Template.Spec
	}
	if o := decodeAs[batchv1.CronJob](t, text, "CronJob"); o != nil {
		return o.Namespace, &o.Spec.JobTemplate.Spec.Template.Spec
	}
	return "", nil
}

// checkWorkload checks that every claim of a pod has a template that came before, that every
// request of it is used, and that containers name requests which are there.
func checkWorkload(t *testing.T, text []byte, templates map[string]*resourceapi.ResourceClaimTemplate) {
	t.Helper()
	namespace, spec := podSpecOf(t, text)
	if spec == nil {
		return
	}
	unused := map[string]bool{}
	requests := map[string]bool{}
	for _, claim := range spec.ResourceClaims {
		if claim.ResourceClaimTemplateName == nil {
			requests[claim.Name+"/"] = true
			continue
		}
		template := templates[namespace+"/"+*claim.ResourceClaimTemplateName]
		if template == nil {
			t.Errorf("there is no template %s before\n%s", *claim.ResourceClaimTemplateName, text)
			continue
		}
		all := template.Spec.Spec.Devices.Requests
		if len(all) == 1 {
			requests[claim.Name+"/"], unused[claim.Name+"/"] = true, true
			continue
		}
		for _, r := range all {
			requests[claim.Name+"/"+r.Name], unused[claim.Name+"/"+r.Name] = true, true
		}
	}
	for _, c := range append(append([]corev1.Container{}, spec.InitContainers...), spec.Containers...) {
		for _, claim := range c.Resources.Claims {
			used := claim.Name + "/" + claim.Request
			if !requests[used] {
				t.Errorf("container %s has %s, which the pod has not\n%s", c.Name, used, text)
			}
			delete(unused, used)
		}
	}
	for request := range unused {
		t.Errorf("no container has %s\n%s", request, text)
	}
}

// TestEveryKind translates each kind that has pods, in every version of its API, and passes on
// the same name in another group.
func TestEveryKind(t *testing.T) {
	const spec = "{containers: [{name: main, image: registry.example.com/main, resources: {limits: {nvidia.com/gpu: 1}}}]}"
	kinds := map[string]string{
		"v1 Pod":                   "spec: " + spec,
		"v1 PodTemplate":           "template: {spec: " + spec + "}",
		"v1 ReplicationController": "spec: {template: {spec: " + spec + "}}",
		"apps/v1 Deployment":       "spec: {template: {spec: " + spec + "}}",
		"apps/v1 ReplicaSet":       "spec: {template: {spec: " + spec + "}}",
		"apps/v1beta2 StatefulSet": "spec: {template: {spec: " + spec + "}}",
		"apps/v1 DaemonSet":        "spec: {template: {spec: " + spec + "}}",
		"batch/v1 Job":             "spec: {template: {spec: " + spec + "}}",
		"batch/v1beta1 CronJob":    "spec: {jobTemplate: {spec: {template: {spec: " + spec + "}}}}",
	}
	for kind, body := range kinds {
		version, name, _ := strings.Cut(kind, " ")
		object := fmt.Sprintf("apiVersion: %s\nkind: %s\nmetadata: {name: one}\n%s\n", version, name, body)
		out, _, err := run(t, object, "pods", "-")
		if err != nil || !strings.Contains(out, "objects changed: 1\n") || strings.Contains(out, "nvidia.com/gpu:") {
			t.Errorf("%s: %v\n%s", kind, err, out)
		}
		other := strings.Replace(object, "apiVersion: ", "apiVersion: example.com/", 1)
		if strings.Count(version, "/") == 0 {
			other = strings.Replace(object, "apiVersion: v1", "apiVersion: example.com/v1", 1)
		}
		out, _, err = run(t, other, "pods", "-")
		if err != nil || !strings.Contains(out, "objects changed: 0\n") || !strings.HasSuffix(out, other) || !strings.Contains(out, "not translated: "+name+" one: ") {
			t.Errorf("%s in another group: %v\n%s", kind, err, out)
		}
	}
	if len(kinds) != 9 {
		t.Errorf("%d kinds were tried, want 9", len(kinds))
	}
}

// TestSeveralFiles: files are one stream, in which templates have different names.
func TestSeveralFiles(t *testing.T) {
	file := "testdata/pods/deployment.yaml"
	out := mustRun(t, "pods", file, file)
	if strings.Count(out, "name: search-gpu-2\n") != 1 || strings.Count(out, "resourceClaimTemplateName: search-gpu-2\n") != 1 {
		t.Errorf("want a second template search-gpu-2:\n%s", out)
	}
}
