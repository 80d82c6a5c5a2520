// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func clusterOf(t *testing.T) *fake.Clientset {
	t.Helper()
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	client := fake.NewClientset(
		&corev1.Node{ObjectMeta: meta("", "node-1")},
		&resourceapi.ResourceClaim{ObjectMeta: meta("team", "mine")}, &resourceapi.ResourceClaim{ObjectMeta: meta("other", "theirs")},
		&resourceapi.ResourceClaimTemplate{ObjectMeta: meta("team", "template")},
		&resourceapi.DeviceClass{ObjectMeta: meta("", "gpu.nvidia.com")},
		&resourceapi.DeviceTaintRule{ObjectMeta: meta("", "rule")},
		&corev1.Pod{ObjectMeta: meta("team", "pod")}, &corev1.Pod{ObjectMeta: meta("other", "pod")},
	)
	for _, s := range slicesOf(t, board("t4")) {
		if err := client.Tracker().Add(s); err != nil {
			t.Fatal(err)
		}
	}
	return client
}

func TestRead(t *testing.T) {
	t.Parallel()
	s, err := Read(t.Context(), clusterOf(t), "team")
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Nodes) != 1 || len(s.Slices) != 2 || len(s.Classes) != 1 || len(s.TaintRules) != 1 || len(s.Claims) != 2 || len(s.Templates) != 1 || len(s.Pods) != 2 || len(s.Missing) != 0 {
		t.Errorf("%+v", s)
	}
}

// forbid has the API server refuse lists as it does without the right.
func forbid(client *fake.Clientset, resource, namespace string) {
	client.PrependReactor("list", resource, func(a clienttesting.Action) (bool, runtime.Object, error) {
		if namespace != "*" && a.GetNamespace() != namespace {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: a.GetResource().Group, Resource: resource}, "", errors.New("no right"))
	})
}

// TestMissingRights: what may not be read is named, and what is unknown without it.
func TestMissingRights(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		resource, where, namespace string
		want                       []string
		claims                     int
	}{
		{"nodes", "*", "team", []string{"cannot list nodes: ", "without it is unknown which labels"}, 2},
		{"resourceslices", "*", "team", []string{"cannot list resourceslices.resource.k8s.io: ", "without it is unknown which devices there are"}, 2},
		{"devicetaintrules", "*", "team", []string{"cannot list devicetaintrules.resource.k8s.io: ", "which devices rules keep"}, 2},
		{"resourceclaims", "", "team", []string{"cannot list resourceclaims.resource.k8s.io in all namespaces: ", "who has devices that look free"}, 1},
		{"resourceclaims", "*", "team", []string{"cannot list resourceclaims.resource.k8s.io in namespace team: "}, 0},
		{"resourceclaims", "*", "", []string{"cannot list resourceclaims.resource.k8s.io in all namespaces: "}, 0},
		{"pods", "", "team", []string{"cannot list pods in all namespaces: ", "which pods use a claim"}, 2},
	} {
		t.Run(c.resource+c.where+c.namespace, func(t *testing.T) {
			t.Parallel()
			client := clusterOf(t)
			forbid(client, c.resource, c.where)
			s, err := Read(t.Context(), client, c.namespace)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range c.want {
				if !slices.ContainsFunc(s.Missing, func(m Missing) bool { return strings.Contains(m.String(), want) }) {
					t.Errorf("%v, want %q", s.Missing, want)
				}
			}
			if len(s.Claims) != c.claims || !apierrors.IsForbidden(s.Missing[0].Err) {
				t.Errorf("%d claims, %v", len(s.Claims), s.Missing)
			}
		})
	}
}

// TestReadFails: an API server that does not answer is no missing right.
func TestReadFails(t *testing.T) {
	t.Parallel()
	client := clusterOf(t)
	failure := apierrors.NewInternalError(errors.New("etcd is gone"))
	client.PrependReactor("list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, failure })
	if _, err := Read(t.Context(), client, "team"); err == nil || !errors.Is(err, failure) || !strings.HasPrefix(err.Error(), "list resourceclaims.resource.k8s.io: ") {
		t.Error(err)
	}
}

// TestNeed: a list of one namespace is enough where that is asked for.
func TestNeed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		resource, where, namespace, need string
		fails                            bool
	}{
		{"resourceclaims", "", "team", ResourceClaims, false}, {"resourceclaims", "*", "team", ResourceClaims, true}, {"resourceclaims", "", "", ResourceClaims, true},
		{"resourceslices", "*", "team", ResourceSlices, true}, {"resourceslices", "*", "team", ResourceClaims, false}, {"pods", "*", "team", ResourceClaims, false},
	} {
		client := clusterOf(t)
		forbid(client, c.resource, c.where)
		s, err := Read(t.Context(), client, c.namespace)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Need(c.namespace, c.need); (err != nil) != c.fails || c.fails && !apierrors.IsForbidden(err) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestWarn leaves out what a command has no use for.
func TestWarn(t *testing.T) {
	t.Parallel()
	client := clusterOf(t)
	forbid(client, "pods", "*")
	forbid(client, "deviceclasses", "*")
	s, err := Read(t.Context(), client, "team")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	s.Warn(&out, ResourceClasses)
	const want = "warning: cannot list pods in all namespaces: it is forbidden; without it is unknown which pods use a claim\n" +
		"warning: cannot list pods in namespace team: it is forbidden; without it is unknown which pods use a claim\n"
	if out.String() != want {
		t.Error(out.String())
	}
}

// TestOldAPIServer: one without resource.k8s.io/v1 is named as the cause.
func TestOldAPIServer(t *testing.T) {
	missing := apierrors.NewNotFound(schema.GroupResource{}, "")
	for resource, want := range map[string]string{
		ResourceSlices:     "does not have it in resource.k8s.io/v1: Kubernetes does since 1.34",
		ResourceTaintRules: "Kubernetes 1.37 does",
	} {
		if got := (Missing{Resource: resource, Err: missing, Absent: true}).String(); !strings.Contains(got, want) {
			t.Errorf("%s: %s", resource, got)
		}
	}
}
