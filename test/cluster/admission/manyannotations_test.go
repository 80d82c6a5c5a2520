// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// TestManyAnnotations: a tenant cannot have the API server look through as many annotations as a pod may have, which takes it half a minute, and
// cannot hide one behind them. A pod that had as many before goes on.
func TestManyAnnotations(t *testing.T) {
	server := newAPIServer(t, "defaults")
	pod := func(n int, more map[string]string) *corev1.Pod {
		annotations := maps.Clone(more)
		for i := range n {
			annotations[fmt.Sprintf("a%d", i)] = ""
		}
		return &corev1.Pod{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: annotations},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "x"}}},
		}
	}
	none, gpus := map[string]string{}, map[string]string{"nvidia.cdi.k8s.io/pod": "nvidia.com/gpu=all"}
	for name, test := range map[string]struct {
		request
		want string
	}{
		"a thousand":            {request{operation: admission.Create, object: pod(1000, none)}, ""},
		"more":                  {request{operation: admission.Create, object: pod(1001, none)}, "more than 1000"},
		"more, and one of GPUs": {request{operation: admission.Create, object: pod(20_000, gpus)}, "more than 1000"},
		"one of GPUs":           {request{operation: admission.Create, object: pod(900, gpus)}, "nvidia.cdi.k8s.io/pod"},
		"they become more":      {request{operation: admission.Update, object: pod(1001, none), old: pod(1000, none)}, "more than 1000"},
		"they were more":        {request{operation: admission.Update, object: pod(2001, none), old: pod(2000, none)}, ""},
	} {
		test.by, test.namespace = somebody, "default"
		_, err := server.ask(t, test.request)
		if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %.300v, want %q", name, err, test.want)
		}
	}
}
