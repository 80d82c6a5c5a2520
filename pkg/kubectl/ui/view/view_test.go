// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
	"github.com/partage-dev/partage/pkg/kubectl/tree"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/kubectl/fleets"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
	"github.com/partage-dev/partage/test/must"
)

// encoded returns the parts of a page as the browser gets them.
func encoded(tb testing.TB, in Input) (all map[string]json.RawMessage) {
	tb.Helper()
	must.Do(tb, json.Unmarshal(must.Get(json.Marshal(New(in)))(tb), &all))
	return all
}

// TestBlocks compares what is drawn of the demo's GPUs: each block's start, size, kind and claims.
func TestBlocks(t *testing.T) {
	objects := must.Get(fleets.Demo())(t)
	s := must.Get(fleet.Read(t.Context(), fake.NewClientset(objects...), ""))(t)
	all := encoded(t, Input{Model: fleet.New(s, fleets.Driver)})
	want := map[string][]string{
		"dgx-1": {
			"part: 0+2 mig embed-0, 2+1 free, 3+1 free, 4+1 mig notebook-lin, 5+1 free, 6+1 mig notebook-ada",
			"full: 0+4 mig llm-small-0, 4+3 mig llm-small-1",
			"part: 0+7 mps api-0 api-1 api-2",
			"full: 0+7 gpu pretrain-0",
			"full: 0+7 gpu pretrain-0",
			"full: 0+7 gpu finetune-7b",
			"free: 0+1 free, 1+1 free, 2+1 free, 3+1 free, 4+1 free, 5+1 free, 6+1 free",
			"free: 0+1 free, 1+1 free, 2+1 free, 3+1 free, 4+1 free, 5+1 free, 6+1 free",
		},
		"edge-3": {"part: 0+1 timeslice runner-a runner-b", "free: 0+1 free"},
	}
	for name, gpus := range want {
		var node Node
		must.Do(t, json.Unmarshal(all["node/"+name], &node))
		if len(node.GPUs) != len(gpus) {
			t.Fatalf("node %s has %d GPUs, want %d", name, len(node.GPUs), len(gpus))
		}
		for i, g := range node.GPUs {
			expect.Equal(t, drawn(g), gpus[i], "node", name, "GPU", i)
		}
	}
}

func drawn(g GPU) string {
	var blocks []string
	for i := range g.Blocks {
		b := &g.Blocks[i]
		text := string(rune('0'+b.Start)) + "+" + string(rune('0'+b.Size)) + " " + b.Kind
		for _, p := range b.Parts {
			text += " " + p.Claim[strings.LastIndex(p.Claim, "/")+1:]
		}
		blocks = append(blocks, text)
	}
	return g.Use + ": " + strings.Join(blocks, ", ")
}

// TestReservation: a GPU that an administrator keeps for somebody, or of which a part is being released, is not unhealthy, one that is lost is.
func TestReservation(t *testing.T) {
	for key, bad := range map[string]bool{
		"team-b": false, fleettest.Driver + "/cordoned": false, fleettest.Driver + "/foreign-claim": false, fleettest.Driver + "/release-pending": false,
		fleettest.Driver + "/row-remap-pending": true, fleettest.Driver + "/lost": true,
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(fleettest.Driver)},
			Taint:          resourceapi.DeviceTaint{Key: key, Value: "reserved", Effect: resourceapi.DeviceTaintEffectNoSchedule},
		}})
		g := gpuOf(fleet.New(f.Snapshot, fleettest.Driver).Nodes[0].GPUs[0], fleettest.Driver, usages{})
		if g.Bad != bad || len(g.Notes) != 1 || g.Notes[0].Bad != bad {
			t.Errorf("%s: bad %t, want %t; %+v", key, g.Bad, bad, g.Notes)
		}
	}
}

// TestFreeAsInTree: a slice is free where a device that has it can be allocated, the undivided GPU as well as a partition.
func TestFreeAsInTree(t *testing.T) {
	for name, c := range map[string]struct {
		published, tainted func(kind string) bool
		want               string
	}{
		"partitions are withdrawn":   {func(string) bool { return true }, func(kind string) bool { return kind != fleet.TypeGPU }, KindFree},
		"the whole GPU is withdrawn": {func(string) bool { return true }, func(kind string) bool { return kind == fleet.TypeGPU }, KindFree},
		"all is":                     {func(string) bool { return true }, func(string) bool { return true }, KindBlocked},
		"no partition is published":  {func(kind string) bool { return kind == fleet.TypeGPU }, func(string) bool { return true }, KindBlocked},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		for _, s := range f.Slices {
			s.Spec.Devices = slices.DeleteFunc(s.Spec.Devices, func(d resourceapi.Device) bool {
				return !c.published(*d.Attributes["type"].StringValue)
			})
			for i := range s.Spec.Devices {
				if d := &s.Spec.Devices[i]; c.tainted(*d.Attributes["type"].StringValue) {
					d.Taints = []resourceapi.DeviceTaint{{Key: fleettest.Driver + "/withdrawn", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
				}
			}
		}
		m := fleet.New(f.Snapshot, fleettest.Driver)
		drawn := must.Get(tree.New(m, nil, labels.Everything()))(t)
		for i, cell := range drawn.Nodes[0].GPUs[0].Cells {
			if b := gpuOf(m.Nodes[0].GPUs[0], fleettest.Driver, usages{}).Blocks[i]; b.Start != i || b.Kind != c.want || cell.State != c.want {
				t.Errorf("%s: slice %d is %s in the page at %d, and %s in tree; want %s", name, i, b.Kind, b.Start, cell.State, c.want)
			}
		}
	}
}

// TestHiddenClaims: what a claim may have that cannot be read is not free.
func TestHiddenClaims(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team", "own", "n1", fleettest.Request("mig.nvidia.com", fleettest.Profile("3g.40gb")))
	f.AddNode("n2", "h100-80-sxm", 1)
	f.AddNode("n3", "h100-80-sxm", 1)
	f.Held("team", "share", "n3", fleettest.Share("mps.partage.dev", "10Gi", "30"))
	f.Missing = []fleet.Missing{{Resource: fleet.ResourceClaims}}
	all := encoded(t, Input{Model: fleet.New(f.Snapshot, fleettest.Driver)})
	var meta Meta
	var own, node, shares Node
	must.Do(t, errors.Join(json.Unmarshal(all["meta"], &meta), json.Unmarshal(all["node/n1"], &own), json.Unmarshal(all["node/n2"], &node),
		json.Unmarshal(all["node/n3"], &shares)))
	if s := meta.Summary; s.Free != 0 || s.Unknown != 1 || s.Used != 2 || !s.AtLeast {
		t.Errorf("%+v", s)
	}
	if g := node.GPUs[0]; g.Use != "unknown" || len(g.Fits) != 1 || !strings.HasPrefix(g.Fits[0], "unknown") {
		t.Errorf("%+v", g)
	}
	if b := shares.GPUs[0].Blocks[0]; !b.AtLeast || b.Total.Shares != 4 || len(b.Parts) != 1 || own.GPUs[0].Blocks[0].AtLeast {
		t.Errorf("%+v, %+v", b, own.GPUs[0].Blocks[0])
	}
}

// TestHiddenClaimOfPartition: a partition that somebody else made may be a claim's that cannot be read.
func TestHiddenClaimOfPartition(t *testing.T) {
	for want, missing := range map[string][]fleet.Missing{KindFree: nil, KindUnknown: {{Resource: fleet.ResourceClaims}}} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.Missing = missing
		devices := f.Slices[len(f.Slices)-1].Spec.Devices
		made := slices.IndexFunc(devices, func(d resourceapi.Device) bool { return *d.Attributes["type"].StringValue == fleet.TypeMIG })
		devices[made].Name += "-static"
		for _, b := range gpuOf(fleet.New(f.Snapshot, fleettest.Driver).Nodes[0].GPUs[0], fleettest.Driver, usages{}).Blocks {
			expect.Equal(t, b.Kind, want, b)
		}
	}
}

// TestUsage: what is used of each part, as far as it was told; what was not told is unknown, and no zero.
func TestUsage(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.AddNode("n2", "h100-80-sxm", 1)
	now := fleettest.Start
	of := func(name, node string) scrape.ID {
		c := f.Held("team", name, node, fleettest.Request("mig.nvidia.com", fleettest.Profile("3g.40gb")))
		return scrape.ID{Namespace: "team", Name: name, Node: node, Device: c.Status.Allocation.Devices.Results[0].Device}
	}
	busy, idle := of("busy", "n1"), of("idle", "n1")
	of("silent", "n2")
	told := &scrape.Result{
		Claims: map[scrape.ID]*scrape.Claim{
			busy: {ID: busy, UsedBytes: new(int64(10<<30 + 5)), Utilization: new(0.456), Idle: new(time.Duration(0))},
			idle: {ID: idle, Idle: new(2*time.Hour + 10*time.Second)},
		},
		Failures: []scrape.Failure{{Node: "n2", Err: errors.New("no answer")}},
	}
	m := fleet.New(f.Snapshot, fleettest.Driver)
	told.GPUs = []scrape.GPU{{Node: "n1", PCIBusID: m.Nodes[0].GPUs[0].PCIBusID, UsedBytes: new(int64(12 << 30)), MemoryBytes: new(int64(80 << 30))}}
	all := encoded(t, Input{Model: m, Measured: Measured{At: now, Told: told}})
	var meta Meta
	var n1, n2 Node
	must.Do(t, errors.Join(json.Unmarshal(all["meta"], &meta), json.Unmarshal(all["node/n1"], &n1), json.Unmarshal(all["node/n2"], &n2)))
	usageOf := func(n Node, claim string) *Usage {
		for _, b := range n.GPUs[0].Blocks {
			for _, p := range b.Parts {
				if p.Claim == "claim/team/"+claim {
					return p.Usage
				}
			}
		}
		return nil
	}
	if u := usageOf(n1, "busy"); u == nil || *u.Memory != 10<<30 || u.Of < 39<<30 || *u.Busy != 46 || u.Idle != nil {
		t.Errorf("busy: %+v", u)
	}
	if u := usageOf(n1, "idle"); u == nil || u.Memory != nil || u.Busy != nil || !u.Idle.Equal(now.Add(-2*time.Hour-time.Minute).Truncate(time.Minute)) {
		t.Errorf("idle: %+v", u)
	}
	if u := usageOf(n2, "silent"); u == nil || u.Memory != nil || !strings.Contains(u.Unknown, "does not answer") {
		t.Errorf("silent: %+v", u)
	}
	if s := meta.Summary; s.Told != 1 || s.Memory != 12<<30 || s.Of != 80<<30 || s.Room != 1 || n2.GPUs[0].Usage != nil {
		t.Errorf("%+v, %+v", s, n2.GPUs[0].Usage)
	}

	// Nobody was asked: nothing is said.
	if all := encoded(t, Input{Model: m}); strings.Contains(string(all["node/n1"]), "usage") {
		t.Errorf("%s", all["node/n1"])
	}
}

// TestWhose: the names of most claims are made up, so that people see whose they are.
func TestWhose(t *testing.T) {
	pod := func(name, owner string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if owner != "" {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "StatefulSet", Name: owner, Controller: new(true)}}
		}
		return p
	}
	for _, test := range []struct {
		want string
		pods []*corev1.Pod
	}{
		{"web", []*corev1.Pod{pod("web-0", "web"), pod("web-1", "web")}},
		{"alone", []*corev1.Pod{pod("alone", "")}},
		{"web-0-gpu-x7k2p", []*corev1.Pod{pod("web-0", "web"), pod("alone", "")}},
		{"web-0-gpu-x7k2p", nil},
	} {
		expect.Equal(t, whose("web-0-gpu-x7k2p", test.pods), test.want)
	}
}

// TestPodsWithoutClaims: a pod whose claim or template is not there waits as others do, and is counted among them.
func TestPodsWithoutClaims(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	for name, ref := range map[string]corev1.PodResourceClaim{
		"claim": {Name: "gpu", ResourceClaimName: new("no-such-claim")}, "template": {Name: "gpu", ResourceClaimTemplateName: new("no-such-template")}, "none": {},
	} {
		pod := f.Pod("team", name)
		pod.Status.Phase = corev1.PodPending
		pod.Spec.ResourceClaims = nil
		if ref.Name != "" {
			pod.Spec.ResourceClaims = []corev1.PodResourceClaim{ref}
		}
		f.Pods = append(f.Pods, pod)
	}
	all := encoded(t, Input{Model: fleet.New(f.Snapshot, fleettest.Driver)})
	var meta Meta
	if err := json.Unmarshal(all["meta"], &meta); err != nil || meta.Summary.Waiting != 2 || all["pod/team/claim"] == nil || all["pod/team/template"] == nil {
		t.Errorf("%v, %+v", err, meta.Summary)
	}
}

// TestStarting: a pod that came a step further a moment ago is not stuck, unless its explanation says so.
func TestStarting(t *testing.T) {
	for name, test := range map[string]struct {
		scheduled    time.Duration // ago
		explanations map[string]Explanation
		stuck        int
	}{
		"a moment ago":                 {scheduled: time.Second},
		"long ago":                     {scheduled: time.Hour, stuck: 1},
		"long ago, and said to start":  {scheduled: time.Hour, explanations: map[string]Explanation{"pod/serving/embed-0": {Starting: true}}},
		"a moment ago, with a failure": {scheduled: time.Second, explanations: map[string]Explanation{"pod/serving/embed-0": {}}, stuck: 1},
	} {
		objects := must.Get(fleets.Demo())(t)
		s := must.Get(fleet.Read(t.Context(), fake.NewClientset(objects...), ""))(t)
		for _, pod := range s.Pods {
			if PodKey(pod) == "pod/serving/embed-0" {
				pod.Status.Phase = corev1.PodPending
				at := metav1.NewTime(time.Now().Add(-test.scheduled))
				pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: at}}
			}
		}
		var meta Meta
		must.Do(t, json.Unmarshal(encoded(t, Input{Model: fleet.New(s, fleets.Driver), Explanations: test.explanations})["meta"], &meta))
		expect.Equal(t, meta.Summary.Stuck, test.stuck, name)
	}
}

// TestXID: a number alone says nothing, so it is said what it means and what to do.
func TestXID(t *testing.T) {
	for value, want := range map[string]string{
		"94":   "Contained memory error. The programs that were hit",
		"9999": "not known to this version of the driver. See https://docs.nvidia.com/deploy/xid-errors.",
		"x":    "docs/reference/xids.md",
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(fleettest.Driver)},
			Taint:          resourceapi.DeviceTaint{Key: fleettest.Driver + "/xid", Value: value, Effect: resourceapi.DeviceTaintEffectNoSchedule},
		}})
		badges := notesOf(fleet.New(f.Snapshot, fleettest.Driver).Nodes[0].GPUs[0], fleettest.Driver)
		if len(badges) != 1 || badges[0].Text != "XID "+value || !strings.Contains(badges[0].Title, want) {
			t.Errorf("%+v, want %q", badges, want)
		}
	}
}
