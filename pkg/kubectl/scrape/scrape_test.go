// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scrape_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
	"github.com/partage-dev/partage/test/kubectl/scrapetest"
)

type response = scrapetest.Response

func cluster(t *testing.T, responses map[string]response, pods ...*corev1.Pod) *fake.Clientset {
	t.Helper()
	return scrapetest.Cluster(t, &fleet.Snapshot{}, responses, pods...)
}

func TestPods(t *testing.T) {
	t.Parallel()
	client := cluster(t, map[string]response{"a": {Body: scrapetest.Everything(t)}, "b": {Body: scrapetest.Everything(t)}}, scrapetest.Pod("a", "node-1"), scrapetest.Pod("b", "node-2"))
	r, err := scrape.Pods(t.Context(), client, scrape.Options{})
	if err != nil || len(r.Failures) != 0 {
		t.Fatalf("%v, %v", err, r)
	}
	if len(r.Claims) != 10 || len(r.GPUs) != 4 {
		t.Fatalf("%d claims, %d GPUs", len(r.Claims), len(r.GPUs))
	}
	want := scrape.Claim{
		ID:   scrape.ID{Namespace: "team", Name: "whole", Node: "node-2", Device: "gpu-0000-11-00-0"},
		Kind: "gpu", UUID: "GPU-00000001-0000-4000-8000-000000000000",
		UsedBytes: new(int64(1 << 30)), PeakBytes: new(int64(2 << 30)), LimitBytes: new(int64(80 << 30)),
		Utilization: new(0.5), Processes: new(int64(1)), Idle: new(3 * time.Second), Since: time.Unix(1_800_000_000, 0),
	}
	if diff := cmp.Diff(&want, r.Claims[want.ID]); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	gpu := scrape.GPU{
		Node: "node-1", PCIBusID: "0000:10:00.0", UUID: "GPU-00000000-0000-4000-8000-000000000000", ProductName: "NVIDIA H100 80GB HBM3",
		Healthy: new(true), Role: "partitioned", Temperature: new(55.0),
	}
	got := r.GPUs[0]
	if got.MemoryBytes == nil || *got.MemoryBytes < 79<<30 || got.AllocatedBytes == nil || got.UsedBytes == nil {
		t.Errorf("%+v", got)
	}
	got.MemoryBytes, got.AllocatedBytes, got.UsedBytes = nil, nil, nil
	if diff := cmp.Diff(gpu, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	// What the driver does not tell is not known, and no zero.
	for _, c := range r.Claims {
		if c.Name == "share" && (c.UsedBytes != nil || c.Idle != nil || c.Utilization != nil) {
			t.Errorf("%+v", c)
		}
	}
}

// TestRights: the Role for metrics has all that is read in the driver's namespace, and the ClusterRole for fleets the rest.
func TestRights(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../../deployments/kubectl-gpu/viewer.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := map[string][]rbacv1.PolicyRule{}
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		var role rbacv1.Role
		if err := yaml.Unmarshal([]byte(document), &role); err != nil {
			t.Fatal(err)
		}
		rules[role.Name] = role.Rules
	}
	client := cluster(t, map[string]response{"a": {Body: scrapetest.Everything(t)}}, scrapetest.Pod("a", "node-1"))
	if _, err := scrape.Pods(t.Context(), client, scrape.Options{}); err != nil {
		t.Fatal(err)
	}
	for _, a := range client.Actions() {
		role, resource := "kubectl-gpu-metrics", a.GetResource().Resource
		if _, is := a.(clienttesting.ProxyGetAction); is {
			resource += "/proxy"
		}
		if a.GetNamespace() == "" {
			role = "kubectl-gpu-fleet"
		}
		if !slices.ContainsFunc(rules[role], func(r rbacv1.PolicyRule) bool {
			return slices.Contains(r.APIGroups, a.GetResource().Group) && slices.Contains(r.Resources, resource) && slices.Contains(r.Verbs, a.GetVerb())
		}) {
			t.Errorf("%s has no right to %s %s", role, a.GetVerb(), resource)
		}
	}
	if n := len(client.Actions()); n < 3 {
		t.Errorf("only %d requests", n)
	}
}

// TestTwoPodsOfANode: while the driver is upgraded, only the pod is asked that has known the claims for longer, and does not end.
func TestTwoPodsOfANode(t *testing.T) {
	t.Parallel()
	a, b, ending := scrapetest.Pod("a", "node-1"), scrapetest.Pod("b", "node-1"), scrapetest.Pod("ending", "node-1")
	a.CreationTimestamp, b.CreationTimestamp, ending.CreationTimestamp = metav1.Unix(3, 0), metav1.Unix(2, 0), metav1.Unix(1, 0)
	ending.DeletionTimestamp, ending.Finalizers = new(metav1.Unix(4, 0)), []string{"x"}
	client := cluster(t, map[string]response{"b": {Body: scrapetest.Everything(t)}}, a, b, ending)
	r, err := scrape.Pods(t.Context(), client, scrape.Options{Namespace: "partage"})
	if err != nil || len(r.Claims) != 5 || len(r.GPUs) != 2 {
		t.Fatalf("%v, %+v", err, r)
	}
	for _, c := range r.Claims {
		if c.Since.Unix() != 1_800_000_000 {
			t.Errorf("%+v", c)
		}
	}
}

// TestFailures: nodes that do not answer are named, and the others are told.
func TestFailures(t *testing.T) {
	t.Parallel()
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods/proxy"}, "f", errors.New("no right"))
	without, waits := scrapetest.Pod("without", "n4"), scrapetest.Pod("waits", "n5")
	without.Spec.Containers[0].Ports = nil
	waits.Status.Phase = corev1.PodPending
	client := cluster(t, map[string]response{
		"good": {Body: scrapetest.Everything(t)}, "hangs": {Hangs: true}, "other": {Body: "up 1\n"}, "garbage": {Body: "{{{\n"},
		"f": {Err: forbidden}, "g": {Err: forbidden},
	}, scrapetest.Pod("good", "n0"), scrapetest.Pod("hangs", "n1"), scrapetest.Pod("other", "n2"), scrapetest.Pod("garbage", "n3"), without, waits, scrapetest.Pod("f", "n6"), scrapetest.Pod("g", "n7"))
	r, err := scrape.Pods(t.Context(), client, scrape.Options{Timeout: 10 * time.Millisecond})
	if err != nil || len(r.Claims) != 5 {
		t.Fatalf("%v, %+v", err, r)
	}
	var out bytes.Buffer
	r.Warn(&out)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{
		"warning: node n1: read the metrics of pod partage/hangs: no answer in 10ms",
		"warning: node n2: read the metrics of pod partage/other: read the answer: it has no partage_build_info",
		"warning: node n3: read the metrics of pod partage/garbage: read the answer: text format parsing error",
		`warning: node n4: read the metrics of pod partage/without: it has no port named "metrics"`,
		`warning: node n5: read the metrics of pod partage/waits: it does not run: its phase is "Pending"`,
		"warning: cannot get pods/proxy in namespace partage: ",
	}
	if len(lines) != len(want) {
		t.Fatal(out.String())
	}
	for i := range want {
		if !strings.HasPrefix(lines[i], want[i]) {
			t.Errorf("%q, want %q", lines[i], want[i])
		}
	}
}

func TestNoPods(t *testing.T) {
	t.Parallel()
	if _, err := scrape.Pods(t.Context(), cluster(t, nil), scrape.Options{Namespace: "gpus"}); err == nil || !strings.Contains(err.Error(), "no pods of the driver (app.kubernetes.io/component=gpu-kubelet-plugin, of a DaemonSet) in namespace gpus") {
		t.Error(err)
	}
	client := cluster(t, nil)
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no right"))
	})
	if _, err := scrape.Pods(t.Context(), client, scrape.Options{}); !apierrors.IsForbidden(err) {
		t.Error(err)
	}
}

// TestPodsOfTenants checks that a pod of a tenant cannot speak for the driver, whatever its labels and metrics are.
func TestPodsOfTenants(t *testing.T) {
	t.Parallel()
	everything := scrapetest.Everything(t)
	elsewhere, alone, own := scrapetest.Pod("elsewhere", "n0"), scrapetest.Pod("alone", "n0"), scrapetest.Pod("own", "n0")
	elsewhere.Namespace = "tenant"
	alone.OwnerReferences = nil
	for _, p := range []*corev1.Pod{elsewhere, alone} {
		p.CreationTimestamp = metav1.Unix(1, 0)
	}
	own.CreationTimestamp = metav1.Unix(2, 0)
	hostile := response{Body: strings.ReplaceAll(everything, "process_start_time_seconds 1800000000", "process_start_time_seconds 1")}
	client := cluster(t, map[string]response{"elsewhere": hostile, "alone": hostile, "own": {Body: everything}}, elsewhere, alone, own)
	r, err := scrape.Pods(t.Context(), client, scrape.Options{})
	if err != nil || len(r.Failures) > 0 || len(r.GPUs) != 2 {
		t.Fatalf("%v, %+v", err, r)
	}
	for _, c := range r.Claims {
		if c.Since.Unix() != scrapetest.Started {
			t.Errorf("told by another pod: %+v", c)
		}
	}

	// Where nobody says which namespace is the driver's, nobody is believed.
	for name, change := range map[string]func(*resourceapi.DeviceClass){
		"no annotation": func(c *resourceapi.DeviceClass) { c.Annotations = nil },
		"no class":      func(c *resourceapi.DeviceClass) { c.Name = "other" },
	} {
		class := scrapetest.Class()
		change(class)
		_, err := scrape.Pods(t.Context(), fake.NewClientset(class, own), scrape.Options{})
		if err == nil || !strings.Contains(err.Error(), "what claims use is unknown") || !strings.Contains(err.Error(), "--driver-namespace") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestLimit: no more than 32 pods are asked at the same time.
func TestLimit(t *testing.T) {
	t.Parallel()
	pods := []runtime.Object{scrapetest.Class()}
	for i := range 100 {
		pods = append(pods, scrapetest.Pod(fmt.Sprint("p", i), fmt.Sprint("n", i)))
	}
	client := fake.NewClientset(pods...)
	var now, most, asked atomic.Int32
	full := make(chan struct{})
	client.AddProxyReactor("pods", func(clienttesting.Action) (bool, rest.ResponseWrapper, error) {
		return true, counted{now: &now, most: &most, asked: &asked, full: full}, nil
	})
	r, err := scrape.Pods(t.Context(), client, scrape.Options{Timeout: time.Minute})
	if err != nil || len(r.Failures) != 100 || asked.Load() != 100 || most.Load() != 32 {
		t.Errorf("%v, %d asked, %d at once", err, asked.Load(), most.Load())
	}
}

// counted waits until 32 requests are there.
type counted struct {
	now, most, asked *atomic.Int32
	full             chan struct{}
}

func (c counted) DoRaw(context.Context) ([]byte, error) { return nil, errors.New("not used") }

func (c counted) Stream(ctx context.Context) (io.ReadCloser, error) {
	n := c.now.Add(1)
	for m := c.most.Load(); m < n && !c.most.CompareAndSwap(m, n); m = c.most.Load() {
	}
	if c.asked.Add(1) == 32 {
		close(c.full)
	}
	select {
	case <-c.full:
	case <-ctx.Done():
	}
	c.now.Add(-1)
	return nil, errors.New("enough")
}
