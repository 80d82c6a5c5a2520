// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestEnoughFor: the end of a claim is no help for all that wait for the same, unless it frees enough.
func TestEnoughFor(t *testing.T) {
	const enough = "which is enough for "
	for name, c := range map[string]struct {
		request resourceapi.DeviceRequest
		pods    int
		// shared says that the pods name one claim, and gated that the others are not looked at.
		shared, gated, hidden bool
		says                  string
	}{
		"one GPU":          {request: fleettest.Request(whole), pods: 6, says: "when other/n1-0 ends, " + enough + "1 of 6 that wait alike: it fits on node n1"},
		"as far as seen":   {request: fleettest.Request(whole), pods: 6, hidden: true, says: enough + "1 of at least 6 that"},
		"seven partitions": {request: fleettest.Request(mig, fleettest.Profile("1g.10gb")), pods: 6},
		"more":             {request: fleettest.Request(mig, fleettest.Profile("1g.10gb")), pods: 9, says: enough + "7 of 9 that"},
		"one claim":        {request: fleettest.Request(whole), pods: 6, shared: true},
		"alone":            {request: fleettest.Request(whole), pods: 1},
		"gated":            {request: fleettest.Request(whole), pods: 6, gated: true},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 2)
		for i := range 2 {
			f.Held("other", fmt.Sprint("n1-", i), "n1", fleettest.Request(whole))
		}
		if c.hidden {
			forbidden(f, fleet.ResourcePods)
		}
		claim := f.Claim("team", "shared", c.request)
		var pod *corev1.Pod
		for i := range c.pods {
			if !c.shared {
				claim = f.Claim("team", fmt.Sprint("c", i), c.request)
			}
			pod = f.Pod("team", fmt.Sprint("p", i), fleettest.Uses(claim))
			if c.gated && i < c.pods-1 {
				pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "x"}}
			}
		}
		got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod))
		if !strings.Contains(got, "when other/n1-0 ends") || !strings.Contains(got, c.says) || strings.Contains(got, enough) != (c.says != "") {
			t.Errorf("%s: want %q in:\n%s", name, c.says, got)
		}
	}
}

// TestTogether: pods of one template that wait alike are told once.
func TestTogether(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("other", "has", "n1", fleettest.Request(whole))
	f.Templates = append(f.Templates, &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "one"}})
	f.Templates[0].Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{fleettest.Request(whole)}
	uses := corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("one")}
	for i := range 28 {
		pod := f.Pod("team", fmt.Sprintf("web-%02d", i), uses)
		if i > 13 { // the claims of the others are not made yet
			claim := f.Claim("team", fmt.Sprintf("web-%02d-gpu-x%d", i, i), fleettest.Request(whole))
			claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: new(true)}}
			pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim.Name}}
		}
	}
	f.Pod("team", "large", fleettest.Uses(f.Claim("team", "large", fleettest.Count(2, whole))))
	all := New(fleet.New(f.Snapshot, fleettest.Driver), now).Waiting(t.Context(), "team")
	got := text(t, all...)
	for _, part := range []string{
		"Pod team/web-00 waits: what it could use is taken.\nSo it is with 27 more pods: web-01, web-02, web-03, web-04, web-05 and 22 more.\n",
		"enough for 1 of 28 that", "\n\nPod team/large waits",
	} {
		if !strings.Contains(got, part) {
			t.Errorf("want %q in:\n%s", part, got)
		}
	}
	if n := strings.Count(got, "Pod team/"); n != 2 || len(all) != 29 || len(View(all...).Names()) != 29 {
		t.Errorf("%d pods are told, want 2 of 29:\n%s", n, got)
	}
}

// TestUnclaiming: a container that names no claim, and asks for no other device, gets none.
func TestUnclaiming(t *testing.T) {
	for name, c := range map[string]struct {
		second corev1.Container
		says   string
	}{
		"names none":   {corev1.Container{Name: "proxy"}, "Container proxy gets no device: it names no claim in resources.claims."},
		"names it":     {corev1.Container{Name: "proxy", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}}, ""},
		"asks, though": {corev1.Container{Name: "proxy", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"example.com/card": resource.MustParse("0")}}}, "gets no device"},
		"asks":         {corev1.Container{Name: "proxy", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"example.com/card": resource.MustParse("1")}}}, ""},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 2)
		waiting := waits(fleettest.Request(whole))(f)
		f.Held("team", "runs", "n1", fleettest.Request(whole))
		for _, pod := range []*corev1.Pod{waiting, f.Pods[len(f.Pods)-1]} {
			pod.Spec.Containers = append(pod.Spec.Containers, c.second)
			got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod))
			if !strings.Contains(got, c.says) || strings.Contains(got, "gets no device") != (c.says != "") {
				t.Errorf("%s: want %q in:\n%s", name, c.says, got)
			}
		}
	}
}

// TestStarting: a pod is not stuck a moment after it has got its node, unless something says so.
func TestStarting(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team", "llm", "n1", fleettest.Request(whole))
	pod := f.Pods[0]
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now.Add(-time.Second))},
	}}
	plugin := f.Pod("partage", "plugin")
	plugin.Labels = map[string]string{fleet.ComponentLabel: fleet.PluginComponent}
	plugin.Spec.NodeName, plugin.Spec.Volumes = "n1", []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/dev"}}}}
	plugin.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	for name, c := range map[string]struct {
		after  time.Duration
		events []corev1.Event
		want   Verdict
	}{
		"at once":           {0, nil, Starting},
		"later":             {2 * time.Minute, nil, IsStuck},
		"something is said": {0, []corev1.Event{{Reason: "FailedPrepareDynamicResources", Message: "something new", LastTimestamp: metav1.NewTime(now)}}, IsStuck},
	} {
		x := New(fleet.New(f.Snapshot, fleettest.Driver), now.Add(c.after))
		x.Events = func(*corev1.Pod, []*resourceapi.ResourceClaim) ([]corev1.Event, error) { return c.events, nil }
		e := x.Pod(t.Context(), pod)
		if got := text(t, e); e.Verdict != c.want || e.Found() != (c.want == IsStuck) || strings.Contains(got, "do not start") != e.Found() {
			t.Errorf("%s: %s, want %s\n%s", name, e.Verdict, c.want, got)
		}
		if all := x.Waiting(t.Context(), "team"); (len(all) > 0) != (c.want == IsStuck) {
			t.Errorf("%s: %d pods wait", name, len(all))
		}
	}
}

// TestUntainted: what the driver says of the GPU of a pod that runs is told before its taint is published, which may take minutes if it keeps
// nobody away.
func TestUntainted(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 2)
	for _, s := range f.Slices {
		s.CreationTimestamp = metav1.NewTime(fleettest.Start)
	}
	f.Held("team", "llm", "n1", fleettest.Request(mig, fleettest.Profile("1g.10gb")))
	event := func(ago time.Duration, kind, reason, message string) corev1.Event {
		return corev1.Event{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default"}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "n1"}, Type: kind, Reason: reason,
			Message: message, ReportingController: fleettest.Driver, FirstTimestamp: metav1.NewTime(now.Add(-ago)), LastTimestamp: metav1.NewTime(now.Add(-ago)),
		}
	}
	pending := event(time.Minute, corev1.EventTypeWarning, "GPURowRemapPending", "GPU 0000:1b:00.0: rows of memory will be replaced.")
	for name, c := range map[string]struct {
		events []corev1.Event
		want   bool
	}{
		"pending":     {[]corev1.Event{pending}, true},
		"another GPU": {[]corev1.Event{event(time.Minute, corev1.EventTypeWarning, "GPURowRemapPending", "GPU 0000:28:00.0: rows")}, false},
		"over":        {[]corev1.Event{pending, event(time.Second, corev1.EventTypeNormal, "GPURecovered", "GPU 0000:1b:00.0: its memory was repaired.")}, false},
		"long ago":    {[]corev1.Event{event(20*time.Minute, corev1.EventTypeWarning, "GPURowRemapPending", "GPU 0000:1b:00.0: rows")}, false},
		"nothing":     {nil, false},
	} {
		x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
		x.NodeEvents = func(string) ([]corev1.Event, error) { return c.events, nil }
		e := x.Pod(t.Context(), f.Pods[0])
		if got := text(t, e); e.Verdict != Allocated || strings.Contains(got, "GPU 0 (1b:00) on n1: memory will be repaired at the next reset. It may still hold") != c.want {
			t.Errorf("%s, want %t:\n%s", name, c.want, got)
		}
	}
}

// TestWidth: lines end where they should, unless a word or a command is longer.
func TestWidth(t *testing.T) {
	files, err := filepath.Glob("testdata/*/*.txt")
	if err != nil || len(files) < 50 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			words := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "- "))
			if len([]rune(line)) > printer.Width+1 && len(words) > 1 && !slices.Contains(words, "kubectl") {
				t.Errorf("%s: %s", file, line)
			}
		}
	}
	var out bytes.Buffer
	p := &page{text: &out, format: printer.Format{Width: 20}}
	p.line("  - some words that go on: kubectl describe quota -n team\n\n  Remedy: it")
	if want := "  - some words that\n    go on:\n    kubectl describe quota -n team\n\n  Remedy: it\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
