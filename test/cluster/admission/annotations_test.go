// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
)

// TestCDIAnnotations: an annotation by which NVIDIA's NRI plugin gives GPUs is refused where it is new or another one, in all requests
// that can write annotations of a pod, but for the namespaces of the driver and of NVIDIA's software.
func TestCDIAnnotations(t *testing.T) {
	const all = "nvidia.com/gpu=all"
	type annotations = map[string]string
	tests := map[string]struct {
		before, after annotations
		refused       string
	}{
		"none":                  {after: nil},
		"others":                {after: annotations{"cdi.k8s.io.example.com/x": all, "example.com/nvidia.cdi.k8s.io": all}, before: annotations{"a": "b"}},
		"of NVIDIA's runtime":   {after: annotations{"cdi.k8s.io/x": all}, before: annotations{"a": "b"}, refused: "cdi.k8s.io/x: Forbidden"},
		"of a container":        {after: annotations{"nvidia.cdi.k8s.io/container.main": all, "a": "b"}, refused: "nvidia.cdi.k8s.io/container.main: Forbidden"},
		"of the pod":            {after: annotations{"nvidia.cdi.k8s.io/pod": all}, before: annotations{"a": "b"}, refused: "nvidia.cdi.k8s.io/pod: Forbidden"},
		"of everything":         {after: annotations{"nvidia.cdi.k8s.io": "k8s.gpu.nvidia.com/claim=other-gpu-0"}, refused: "nvidia.cdi.k8s.io: Forbidden"},
		"empty":                 {after: annotations{"nvidia.cdi.k8s.io/pod": ""}, before: annotations{"nvidia.cdi.k8s.io/pod": all}, refused: "pod: Forbidden"},
		"another one":           {after: annotations{"nvidia.cdi.k8s.io/pod": all}, before: annotations{"nvidia.cdi.k8s.io/pod": "x"}, refused: "pod: Forbidden"},
		"older than the policy": {after: annotations{"nvidia.cdi.k8s.io/pod": all, "a": "c"}, before: annotations{"nvidia.cdi.k8s.io/pod": all, "a": "b"}},
		"taken away":            {after: annotations{"a": "b"}, before: annotations{"nvidia.cdi.k8s.io/pod": all}},
	}
	pod := func(a annotations) *corev1.Pod {
		return &corev1.Pod{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: maps.Clone(a)},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "x"}}},
		}
	}
	binding := func(a annotations) *corev1.Binding {
		return &corev1.Binding{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Binding"}, ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: maps.Clone(a)},
			Target: corev1.ObjectReference{Kind: "Node", Name: "node-1"},
		}
	}
	server, cases := newAPIServer(t, "defaults"), 0
	for name, test := range tests {
		for _, namespace := range []string{"default", "kube-system", "gpu-operator", "partage"} {
			for what, r := range map[string]request{
				"create":       {operation: admission.Create, object: pod(test.after)},
				"bind":         {operation: admission.Create, object: binding(test.after), subresource: "binding"},
				"update":       {operation: admission.Update, object: pod(test.after), old: pod(test.before)},
				"status":       {operation: admission.Update, object: pod(test.after), old: pod(test.before), subresource: "status"},
				"resize":       {operation: admission.Update, object: pod(test.after), old: pod(test.before), subresource: "resize"},
				"debug it":     {operation: admission.Update, object: pod(test.after), old: pod(test.before), subresource: "ephemeralcontainers"},
				"pod is older": {operation: admission.Update, object: pod(test.after), old: runtime.Object(pod(nil))},
			} {
				cases++
				r.by, r.namespace = somebody, namespace
				want := test.refused
				if old, isPod := r.old.(*corev1.Pod); r.old == nil || isPod && len(old.Annotations) == 0 {
					for key := range test.after {
						if strings.HasPrefix(key, "nvidia.cdi.k8s.io") {
							want = key + ": Forbidden"
						}
					}
				}
				if namespace != "default" {
					want = ""
				}
				if _, err := server.ask(t, r); (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%s, %s in namespace %s: got %v, want %q", name, what, namespace, err, want)
				}
			}
		}
	}
	if t.Logf("%d cases", cases); cases != 10*4*7 {
		t.Errorf("%d cases", cases)
	}
}
