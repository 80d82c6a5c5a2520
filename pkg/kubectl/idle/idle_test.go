// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package idle

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
	"github.com/partage-dev/partage/test/kubectl/scrapetest"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

func golden(t *testing.T, name, got string) {
	t.Helper()
	fleettest.Golden(t, *update, name, got)
}

var now = fleettest.Start.Add(5 * time.Hour)

// example has a claim for each reason, and some for none.
func example(t *testing.T) (*fleettest.Fleet, *scrape.Result) {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("node-1", "h100-80-sxm", 3)
	f.AddNode("node-2", "t4", 2)
	r := &scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}
	for _, c := range []struct {
		name  string
		idle  time.Duration
		owner string
		node  string
	}{
		{"notebook", 4 * time.Hour, "", "node-1"}, {"web", 2 * time.Hour, "ReplicaSet/web-5d4", "node-1"}, {"train", time.Hour, "Job/train-1", "node-1"},
		{"busy", time.Minute, "", "node-1"}, {"db", time.Hour, "StatefulSet/db", "node-1"}, {"operated", time.Hour, "Trainer/x", "node-1"},
	} {
		claim := f.Held("team", c.name, c.node, fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
		pod := f.Pods[len(f.Pods)-1]
		if kind, name, has := strings.Cut(c.owner, "/"); has {
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: name, Controller: new(true)}}
		}
		pod.Labels = map[string]string{"pod-template-hash": "5d4"}
		add(r, told(claim.Name, "node-1", claim.Status.Allocation.Devices.Results[0].Device, c.idle))
	}
	two := f.Held("team", "two", "node-2", fleettest.Count(2, "gpu.nvidia.com"))
	add(r, told("two", "node-2", two.Status.Allocation.Devices.Results[0].Device, time.Hour))
	add(r, told("two", "node-2", two.Status.Allocation.Devices.Results[1].Device, 45*time.Minute))
	finished := f.Held("team", "finished", "node-1", fleettest.Share("mps.partage.dev", "20Gi", "25"))
	f.Pods[len(f.Pods)-1].Status.Phase = corev1.PodSucceeded
	again := f.Run(finished, "node-1")
	again.Name, again.Status.Phase = "finished-2", corev1.PodFailed
	f.Held("team", "left", "node-1", fleettest.Request("gpu.nvidia.com")).Status.ReservedFor = nil
	half := f.Held("other", "half-done", "node-1", fleettest.Share("mps.partage.dev", "1Gi", "1"))
	ended := f.Run(half, "node-1")
	ended.Name, ended.Status.Phase = "half-done-2", corev1.PodSucceeded
	return f, r
}

func told(name, node, device string, idle time.Duration) scrape.Claim {
	return scrape.Claim{ID: scrape.ID{Namespace: "team", Name: name, Node: node, Device: device}, Idle: &idle, Since: fleettest.Start}
}

func add(r *scrape.Result, c scrape.Claim) { r.Claims[c.ID] = &c }

func find(t *testing.T, q Query) *ClaimList {
	t.Helper()
	f, r := example(t)
	return Find(fleet.New(f.Snapshot, fleettest.Driver), r, q)
}

func TestFind(t *testing.T) {
	t.Parallel()
	for _, format := range []struct {
		file string
		f    printer.Format
	}{{"claims.txt", printer.Format{}}, {"claims-wide.txt", printer.Format{Wide: true}}} {
		var out bytes.Buffer
		if err := find(t, Query{For: 30 * time.Minute, Now: now}).View(true).Write(&out, format.f); err != nil {
			t.Fatal(err)
		}
		golden(t, format.file, out.String())
	}
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.Output = options.OutputJSON
	list := find(t, Query{For: 30 * time.Minute, Now: now})
	if err := printer.Print(o, list, list.View(true)); err != nil {
		t.Fatal(err)
	}
	golden(t, "claims.json", out.String())
}

func TestQuery(t *testing.T) {
	t.Parallel()
	selector, err := labels.Parse("app=llm")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		q     Query
		want  string
		young int
	}{
		{"long", Query{For: 3 * time.Hour, Now: now}, "left finished notebook", 0},
		{"other namespace", Query{For: time.Minute, Now: now, Scope: fleet.Scope{Namespace: "other"}}, "", 0},
		{"labels", Query{For: time.Minute, Now: now, Scope: fleet.Scope{Labels: selector}}, "", 0},
		{"just allocated", Query{For: 30 * time.Minute, Now: fleettest.Start.Add(30 * time.Second)}, "two finished notebook web train db operated", 2},
	} {
		l := find(t, c.q)
		var names []string
		for _, i := range l.Items {
			names = append(names, i.Name)
		}
		if got := strings.Join(names, " "); got != c.want || len(l.Young) != c.young {
			t.Errorf("%s: %q, want %q; young: %v", c.name, got, c.want, l.Young)
		}
	}
}

// TestPodsThatCannotBeRead: they are named by the claim.
func TestPodsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	f, r := example(t)
	f.Pods = nil
	for _, c := range Find(fleet.New(f.Snapshot, fleettest.Driver), r, Query{For: 30 * time.Minute, Now: now}).Items {
		want := "kubectl delete pod -n team " + c.Name
		if c.Reason == Unused {
			want = "kubectl delete resourceclaim -n team left"
		}
		if c.Reason == PodsDone || len(c.Commands) != 1 || c.Commands[0] != want {
			t.Errorf("%+v, want %q", c, want)
		}
	}
}

// errUnknown stands for the error that says that nothing is known.
var errUnknown = errors.New("unknown")

// TestRun: the command from the clients to the exit code, with and without the driver's pods.
func TestRun(t *testing.T) {
	t.Parallel()
	f, _ := example(t)
	for _, c := range []struct {
		name      string
		namespace string
		pods      []*corev1.Pod
		found     error
		errOut    string
		out       string
	}{
		{"with the driver", "", []*corev1.Pod{scrapetest.Pod("a", "node-1")}, options.ErrFound, "warning: node node-1: the driver's pod has been running for ", "left"},
		{"without", "", nil, options.ErrFound, "warning: there are no pods of the driver", "finished"},
		{"nothing is known", "empty", nil, errUnknown, "", ""},
		{"no answer", "empty", []*corev1.Pod{scrapetest.Pod("silent", "node-2")}, errUnknown, "warning: node node-2: ", ""},
		{"nothing", "empty", []*corev1.Pod{scrapetest.Pod("a", "node-1")}, nil, "warning: node node-1: ", "No claim is known to have held devices for 30m without using them.\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			client := scrapetest.Cluster(t, f.Snapshot, map[string]scrapetest.Response{
				"a": {Body: scrapetest.Everything(t)}, "silent": {Err: errors.New("connection refused")},
			}, c.pods...)
			streams, _, out, errOut := genericiooptions.NewTestIOStreams()
			o := options.New(streams)
			o.AllNamespaces = c.namespace == ""
			o.Config.Namespace = &c.namespace
			err := Run(t.Context(), o, client, Flags{Query: Query{For: 30 * time.Minute}}, time.Unix(scrapetest.Started+60, 0))
			if errors.Is(c.found, errUnknown) && err != nil && strings.HasPrefix(err.Error(), "what is idle is unknown: ") {
				// That nothing is idle must not be said, then.
				err = errUnknown
				if out.Len() > 0 {
					t.Errorf("printed %q", out.String())
				}
			}
			if !errors.Is(err, c.found) || !strings.Contains(out.String(), c.out) || !strings.HasPrefix(errOut.String(), c.errOut) {
				t.Errorf("%v\n%s\n%s", err, out.String(), errOut.String())
			}
		})
	}
	o := options.New(genericiooptions.NewTestIOStreamsDiscard())
	if err := Run(t.Context(), o, nil, Flags{}, now); err == nil || err.Error() != "--for 0s: it must be more than 0, such as 30m" {
		t.Error(err)
	}
}

// TestReplicas: what would stop a pod that is not idle is no command, and an owner needs one.
func TestReplicas(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		idle                 int
		waits, runs, another bool
		commands             []string
		note                 string
		sums                 string
	}{
		"all": {idle: 5, commands: []string{"kubectl scale -n team deployment/train --replicas=0"}, sums: "These would free 0.73 GPUs."},
		"four of five": {idle: 4, note: "team: 1 of 5 pods of Deployment train are not idle", sums: "These would free 0.12 GPUs. Look at what the pods do before you run them:\n" +
			"  kubectl delete pod -n team alone\n\n0.49 GPUs cannot be freed without stopping pods that are not idle:\n  # team: 1 of 5 pods"},
		"and one that waits":   {idle: 5, waits: true, commands: []string{"kubectl scale -n team deployment/train --replicas=0"}, sums: "These would free 0.73 GPUs."},
		"one runs without":     {idle: 5, waits: true, runs: true, note: "team: 1 of 6 pods of Deployment train are not idle", sums: "\n0.61 GPUs cannot be freed without stopping"},
		"and another's device": {idle: 5, another: true, note: "team: 1 of 5 pods of Deployment train are not idle", sums: "\n0.61 GPUs cannot be freed without stopping"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("node-1", "h100-80-sxm", 2)
			r := &scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}
			own := func(p *corev1.Pod) {
				p.Labels = map[string]string{"pod-template-hash": "5d4"}
				p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "train-5d4", Controller: new(true)}}
			}
			for i := range 5 {
				claim := f.Held("team", fmt.Sprint("train-", i), "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
				own(f.Pods[len(f.Pods)-1])
				idle := time.Minute
				if i < c.idle {
					idle = time.Hour
				}
				add(r, told(claim.Name, "node-1", claim.Status.Allocation.Devices.Results[0].Device, idle))
			}
			if c.waits {
				own(f.Pod("team", "train-5", fleettest.Uses(f.Claim("team", "train-5"))))
				if c.runs {
					f.Pods[len(f.Pods)-1].Spec.NodeName = "node-1"
				}
			}
			if c.another {
				busy := f.Held("team", "busy", "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
				f.Pods = f.Pods[:len(f.Pods)-1]
				busy.Status.ReservedFor[0].UID = f.Pods[0].UID
			}
			// Another claim is freed in any case: what no command frees is not in the sum.
			alone := f.Held("team", "alone", "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
			add(r, told("alone", "node-1", alone.Status.Allocation.Devices.Results[0].Device, time.Hour))
			var commands, notes []string
			list := Find(fleet.New(f.Snapshot, fleettest.Driver), r, Query{For: 30 * time.Minute, Now: now})
			for _, one := range list.Items {
				if one.Name != "alone" {
					commands, notes = append(commands, one.Commands...), append(notes, one.Notes...)
				}
			}
			var out bytes.Buffer
			if err := list.View(true).Write(&out, printer.Format{}); err != nil || !strings.Contains(out.String(), c.sums) {
				t.Errorf("%v; want %q in\n%s", err, c.sums, out.String())
			}
			if !slices.Equal(commands, c.commands) || (c.note == "") != (len(notes) == 0) || c.note != "" && (len(notes) != 1 || !strings.HasPrefix(notes[0], c.note)) {
				t.Errorf("commands %q, notes %q; want %q, %q", commands, notes, c.commands, c.note)
			}
		})
	}
}

// TestIdleForLess: what is known of claims that have not been idle for long enough is said, too.
func TestIdleForLess(t *testing.T) {
	t.Parallel()
	for long, want := range map[time.Duration]string{
		6 * time.Hour: "No claim is known to have held devices for 6h without using them.\nOther claims that are idle, for less than 6h: 7.\n",
		2 * time.Hour: "--replicas=0\n\nOther claims that are idle, for less than 120m: 5.\n",
	} {
		f, r := example(t)
		f.Claims = slices.DeleteFunc(f.Claims, func(c *resourceapi.ResourceClaim) bool {
			return c.Name == "left" || c.Name == "finished" || c.Name == "half-done"
		})
		var out bytes.Buffer
		list := Find(fleet.New(f.Snapshot, fleettest.Driver), r, Query{For: long, Now: now.Add(24 * time.Hour)})
		if err := list.View(true).Write(&out, printer.Format{}); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v, %s", err, out.String())
		}
	}
}

// TestUnknown: a claim of which nothing was measured, or not for long enough, is not said to be in use.
func TestUnknown(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	f.AddNode("node-1", "h100-80-sxm", 3)
	r := &scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}
	for name, idle := range map[string]time.Duration{"silent": -1, "new": time.Minute, "busy": 0} {
		claim := f.Held("team", name, "node-1", fleettest.Request("gpu.nvidia.com"))
		if one := told(name, "node-1", claim.Status.Allocation.Devices.Results[0].Device, idle); idle >= 0 {
			one.Since = now.Add(-time.Minute)
			add(r, one)
		}
	}
	list := Find(fleet.New(f.Snapshot, fleettest.Driver), r, Query{For: 30 * time.Minute, Now: now})
	var out bytes.Buffer
	if err := list.View(true).Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	if list.Unknown != 2 || len(list.Items) > 0 || !strings.Contains(out.String(), "unknown: 2.\n") {
		t.Errorf("%+v\n%s", list, out.String())
	}
}

// TestSinceRestart: a claim that the driver has not seen at work since it was started, some seconds before its first look, may have been idle
// for longer.
func TestSinceRestart(t *testing.T) {
	t.Parallel()
	for least, want := range map[time.Duration]string{3 * time.Minute: "≥4m35s", 30 * time.Minute: "unknown: 1.\n"} {
		f := fleettest.New(t)
		f.AddNode("node-1", "h100-80-sxm", 1)
		claim := f.Held("team", "old", "node-1", fleettest.Request("gpu.nvidia.com"))
		one := told("old", "node-1", claim.Status.Allocation.Devices.Results[0].Device, 275*time.Second)
		one.Since = now.Add(-5 * time.Minute)
		r := &scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}
		add(r, one)
		list := Find(fleet.New(f.Snapshot, fleettest.Driver), r, Query{For: least, Now: now})
		var out bytes.Buffer
		if err := list.View(true).Write(&out, printer.Format{}); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v, want %q in:\n%s", err, want, out.String())
		}
	}
}

// TestNothingToFree: where there is no command, none is announced.
func TestNothingToFree(t *testing.T) {
	t.Parallel()
	l := &ClaimList{Items: []Claim{{Name: "a", GPUs: 0.5, Devices: []Device{{}}, Notes: []string{"team: why"}}}}
	var out bytes.Buffer
	if err := l.View(false).Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	if want := "\n\n0.50 GPUs cannot be freed without stopping pods that are not idle:\n  # team: why\n"; strings.Contains(out.String(), "These would") || !strings.HasSuffix(out.String(), want) {
		t.Errorf("%s, want %q", out.String(), want)
	}
}

// TestBusyPodThatCannotBeRead: what its other claim says is known, and why there is no command is said.
func TestBusyPodThatCannotBeRead(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	f.AddNode("node-1", "h100-80-sxm", 1)
	r := &scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}
	for name, idle := range map[string]time.Duration{"idle": time.Hour, "busy": 0} {
		claim := f.Held("team", name, "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
		claim.Status.ReservedFor[0].UID = "pod"
		add(r, told(name, "node-1", claim.Status.Allocation.Devices.Results[0].Device, idle))
	}
	f.Pods = nil
	list := Find(fleet.New(f.Snapshot, fleettest.Driver), r, Query{For: 30 * time.Minute, Now: now})
	if len(list.Items) != 1 || list.Items[0].Freed || len(list.Items[0].Commands) > 0 || !slices.Equal(list.Items[0].Notes, []string{"team: pod idle has other devices, which are not idle"}) {
		t.Errorf("%+v", list.Items)
	}
}
