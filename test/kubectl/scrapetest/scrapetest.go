// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package scrapetest makes clusters for tests in which the driver's pods answer with metrics.
package scrapetest

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Namespace is that of the driver's pods.
const Namespace = "partage"

// Started is when the driver's pods were started.
const Started = 1_800_000_000

// Everything is what the driver answers in the tests of package metrics, seen from a package in
// pkg/kubectl, with what the golden file there leaves out because it changes.
func Everything(tb testing.TB) string {
	tb.Helper()
	data, err := os.ReadFile("../../driver/metrics/testdata/everything.txt")
	if err != nil {
		tb.Fatal(err)
	}
	return string(data) + fmt.Sprintf("partage_build_info{version=\"v1\",goversion=\"go1\"} 1\nprocess_start_time_seconds %d\n", Started)
}

// Pod is the driver's pod on a node.
func Pod(name, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: Namespace, Name: name, Labels: map[string]string{fleet.ComponentLabel: fleet.PluginComponent},
			OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "partage-gpu-kubelet-plugin", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{
			{Name: "plugin", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9485}}},
		}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

// Class says where the driver is.
func Class() *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: fleet.MainClass, Annotations: map[string]string{fleet.NamespaceAnnotation: Namespace}}}
}

// Response is an answer through the proxy.
type Response struct {
	Body string
	Err  error
	// Hangs waits for the end of the request.
	Hangs bool
}

// DoRaw returns the answer.
func (r Response) DoRaw(context.Context) ([]byte, error) { return []byte(r.Body), r.Err }

// Stream returns the answer.
func (r Response) Stream(ctx context.Context) (io.ReadCloser, error) {
	if r.Hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return io.NopCloser(strings.NewReader(r.Body)), r.Err
}

// Cluster has the objects of a snapshot, and driver's pods that answer by their names.
func Cluster(tb testing.TB, s *fleet.Snapshot, responses map[string]Response, pods ...*corev1.Pod) *fake.Clientset {
	tb.Helper()
	client := fake.NewClientset()
	objects := []runtime.Object{Class()}
	for _, p := range pods {
		objects = append(objects, p)
	}
	for _, p := range s.Pods {
		objects = append(objects, p)
	}
	for _, n := range s.Nodes {
		objects = append(objects, n)
	}
	for _, o := range s.Slices {
		objects = append(objects, o)
	}
	for _, c := range s.Claims {
		objects = append(objects, c)
	}
	for _, o := range objects {
		if err := client.Tracker().Add(o); err != nil {
			tb.Fatal(err)
		}
	}
	client.AddProxyReactor("pods", func(a clienttesting.Action) (bool, rest.ResponseWrapper, error) {
		get, is := a.(clienttesting.ProxyGetAction)
		if !is || get.GetPort() != "9485" || get.GetPath() != "/metrics" || get.GetScheme() != "http" || get.GetNamespace() != Namespace {
			return true, Response{Err: fmt.Errorf("unexpected request %+v", a)}, nil
		}
		return true, responses[get.GetName()], nil
	})
	return client
}
