// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package top

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes/fake"

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

// example is a cluster in which the driver on node-1 answers, and that on node-2 does not.
func example(t *testing.T) *fake.Clientset {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("node-1", "h100-80-sxm", 1)
	f.AddNode("node-2", "t4", 1)
	// The driver has measured claims of GPUs that are not those of the board.
	whole := f.Held("team", "whole", "node-1", fleettest.Request("gpu.nvidia.com"))
	whole.Status.Allocation.Devices.Results[0].Device = "gpu-0000-11-00-0"
	whole.Labels = map[string]string{"app": "llm"}
	part := f.Held("team", "claim-1", "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.10gb")))
	part.Status.Allocation.Devices.Results[0].Device = "gpu-0000-10-00-0-mig-1g10gb-4"
	f.Held("team", "claim-that-is-new", "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.20gb")))
	f.Held("other", "turns", "node-2", fleettest.Request("timeslice.partage.dev"))
	return scrapetest.Cluster(t, f.Snapshot, map[string]scrapetest.Response{"a": {Body: scrapetest.Everything(t)}, "b": {Hangs: true}},
		scrapetest.Pod("a", "node-1"), scrapetest.Pod("b", "node-2"))
}

func optionsOf() (*options.Options, *bytes.Buffer, *bytes.Buffer) {
	streams, _, out, errOut := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.AllNamespaces = true
	return o, out, errOut
}

func flagsOf(sortBy string) Flags {
	return Flags{SortBy: sortBy, Scrape: scrape.Options{Timeout: 100 * time.Millisecond}, Now: time.Unix(scrapetest.Started+3600, 0)}
}

func TestClaimed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, output, sortBy, selector string }{
		{"claims.txt", "", "name", ""},
		{"claims-wide.txt", "wide", "sm", ""},
		{"claims.yaml", "yaml", "idle", "app=llm"},
		{"claims-names.txt", "name", "memory", ""},
	} {
		t.Run(c.file, func(t *testing.T) {
			t.Parallel()
			o, out, errOut := optionsOf()
			o.Output, o.Selector = c.output, c.selector
			if err := Claimed(t.Context(), o, example(t), flagsOf(c.sortBy)); err != nil {
				t.Fatal(err)
			}
			golden(t, c.file, out.String())
			if want := "warning: node node-2: read the metrics of pod partage/b: no answer in 100ms"; !strings.HasPrefix(errOut.String(), want) {
				t.Errorf("%q, want %q", errOut.String(), want)
			}
		})
	}
}

// TestIdleSinceRestart: the driver forgets when it is restarted, so that a claim may have been idle for longer than it says.
func TestIdleSinceRestart(t *testing.T) {
	t.Parallel()
	for after, want := range map[time.Duration]bool{30 * time.Second: true, time.Hour: false} {
		o, out, _ := optionsOf()
		f := flagsOf("name")
		f.Now = time.Unix(scrapetest.Started, 0).Add(after)
		if err := Claimed(t.Context(), o, example(t), f); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); strings.Contains(got, " ≥3s ") != want || strings.Contains(got, "whether it was idle before is unknown") != want {
			t.Errorf("%s after the start, want %t:\n%s", after, want, got)
		}
	}
}

func TestClaimedFails(t *testing.T) {
	t.Parallel()
	o, _, _ := optionsOf()
	for args, want := range map[string]string{"--sort-by=size": "it must be one of idle, memory, name, node, peak, sm", "nodes --sort-by=size": "it must be one of allocated, memory, name"} {
		c := NewCommand(o)
		c.SilenceErrors, c.SilenceUsage = true, true
		c.SetArgs(strings.Fields(args))
		if err := c.Execute(); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Error(err)
		}
	}
	o.Selector = "a==="
	if err := Claimed(t.Context(), o, example(t), flagsOf("name")); err == nil || !strings.HasPrefix(err.Error(), "-l a===: ") {
		t.Error(err)
	}
}

// TestOrders: what is most of it comes first, and what is not known last.
func TestOrders(t *testing.T) {
	t.Parallel()
	item := func(name string, n int64) ClaimUsage {
		return ClaimUsage{
			Claim:       scrape.Claim{ID: scrape.ID{Name: name, Node: name, Device: name}, UsedBytes: &n, PeakBytes: &n, Utilization: new(float64(n))},
			IdleSeconds: new(float64(n)),
		}
	}
	unknown := func(name string) ClaimUsage {
		return ClaimUsage{Claim: scrape.Claim{ID: scrape.ID{Name: name, Node: name}}}
	}
	tried := 0
	for by := range orders {
		l := &ClaimUsageList{Items: []ClaimUsage{unknown("d"), item("b", 1), item("c", 3), item("a", 2), unknown("e")}}
		l.Sort(by)
		got := ""
		for _, u := range l.Items {
			got += u.Name
		}
		want := "cabde"
		if by == "name" || by == "node" {
			want = "abcde"
		}
		if got != want {
			t.Errorf("%s: %s, want %s", by, got, want)
		}
		tried++
	}
	if tried < 6 {
		t.Errorf("only %d orders", tried)
	}
}

// TestGPUOrders: GPUs and nodes are sorted as claims are, and -l chooses nodes.
func TestGPUOrders(t *testing.T) {
	t.Parallel()
	g := &GPUUsageList{Items: []scrape.GPU{
		{Node: "n", PCIBusID: "0000:1b:00.0", UsedBytes: new(int64(1)), Utilization: new(0.2)}, {Node: "n", PCIBusID: "0000:28:00.0"},
		{Node: "n", PCIBusID: "0000:35:00.0", UsedBytes: new(int64(2)), Temperature: new(40.0)},
	}}
	for by, want := range map[string]string{"memory": "35", "busy": "1b", "temperature": "35", "name": "1b"} {
		if g.Sort(by); !strings.Contains(g.Items[0].PCIBusID, want) {
			t.Errorf("%s: %s is first", by, g.Items[0].PCIBusID)
		}
	}
	n := &NodeUsageList{Items: []NodeUsage{{Node: "a", UsedBytes: new(int64(1)), AllocatedBytes: new(int64(2))}, {Node: "b", UsedBytes: new(int64(2)), AllocatedBytes: new(int64(1))}}}
	for by, want := range map[string]string{"memory": "b", "allocated": "a", "name": "a"} {
		if n.Sort(by); n.Items[0].Node != want {
			t.Errorf("%s: %s is first", by, n.Items[0].Node)
		}
	}
	for selector, want := range map[string]int{"pool=big": 0, "!pool": 2} {
		o, _, _ := optionsOf()
		o.Selector = selector
		if r, err := readGPUs(t.Context(), o, example(t), flagsOf("name")); err != nil || len(r.GPUs) < want || want == 0 && len(r.GPUs) > 0 {
			t.Errorf("%s: %+v, %v", selector, r, err)
		}
	}
}

func TestGPUsAndNodes(t *testing.T) {
	t.Parallel()
	r, err := scrape.Pods(t.Context(), example(t), flagsOf("").Scrape)
	if err != nil {
		t.Fatal(err)
	}
	o, out, _ := optionsOf()
	c := NewCommand(o)
	for _, sub := range c.Commands() {
		if sub.Short == "" || sub.RunE == nil {
			t.Errorf("%s", sub.Name())
		}
	}
	g, n := GPUs(r), Nodes(r)
	if err := g.Table().Write(out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	golden(t, "gpus.txt", out.String())
	out.Reset()
	if err := n.Table().Write(out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	golden(t, "nodes.txt", out.String())
}

// TestUnknownOfNode: what one GPU does not tell is not 0, and the sum of the others is not the node's.
func TestUnknownOfNode(t *testing.T) {
	t.Parallel()
	n := Nodes(&scrape.Result{GPUs: []scrape.GPU{
		{Node: "a", Healthy: new(false), MemoryBytes: new(int64(80) << 30), UsedBytes: new(int64(4) << 30), AllocatedBytes: new(int64(8) << 30)}, {Node: "a", MemoryBytes: new(int64(80) << 30)},
	}})
	var out strings.Builder
	if err := n.Table().Write(&out, printer.Format{NoHeaders: true}); err != nil || strings.Join(strings.Fields(out.String()), " ") != "a 2 1 (1 unknown) 160Gi - - - -" {
		t.Errorf("%v, %s", err, out.String())
	}
}

// TestSilence: that a GPU is not known is no statement that there is none.
func TestSilence(t *testing.T) {
	t.Parallel()
	client := scrapetest.Cluster(t, fleettest.New(t).Snapshot, map[string]scrapetest.Response{"a": {Err: errors.New("connection refused")}}, scrapetest.Pod("a", "node-1"))
	o, _, _ := optionsOf()
	f := flagsOf("name")
	if _, err := readGPUs(t.Context(), o, client, f); err == nil || !strings.Contains(err.Error(), "did not answer") {
		t.Error(err)
	}
	o.Watch = true
	if _, err := readGPUs(t.Context(), o, client, f); err != nil {
		t.Errorf("while somebody watches: %v", err)
	}
}

// TestAsked: what a claim asks for is not what it got.
func TestAsked(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	f.AddNode("node-1", "h100-80-sxm", 3)
	asks := fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.20gb"))
	asks.Exactly.Capacity = fleettest.Share("", "10Gi", "").Exactly.Capacity
	f.Held("team", "a", "node-1", asks)
	f.Held("team", "b", "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("1g.20gb")))
	f.Held("team", "c", "node-1", fleettest.Share("mps.partage.dev", "10000000k", ""))
	got := ""
	for _, u := range Claims(fleet.New(f.Snapshot, fleettest.Driver), &scrape.Result{}, fleet.Scope{}, time.Now()).Items {
		got += " " + printer.BytesOrUnknown(u.RequestedBytes)
	}
	if got != " 10Gi - 9.3Gi" {
		t.Error(got)
	}
}

func TestSelector(t *testing.T) {
	t.Parallel()
	selector, err := labels.Parse("app=llm")
	if err != nil {
		t.Fatal(err)
	}
	f := fleettest.New(t)
	f.AddNode("node-1", "t4", 1)
	f.Held("team", "turns", "node-1", fleettest.Request("timeslice.partage.dev"))
	m := fleet.New(f.Snapshot, fleettest.Driver)
	for _, c := range []struct {
		namespace string
		selector  labels.Selector
		want      int
	}{{"", nil, 1}, {"team", labels.Everything(), 1}, {"other", nil, 0}, {"", selector, 0}} {
		if got := len(Claims(m, &scrape.Result{}, fleet.Scope{Namespace: c.namespace, Labels: c.selector}, time.Now()).Items); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

// TestObserver: the driver has prepared the claim, and measures nothing of what is not its own.
func TestObserver(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	f.AddNode("node-1", "h100-80-sxm", 1)
	observer := f.Held("team", "observer", "node-1", fleettest.Request("gpu.nvidia.com"))
	observer.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	list := Claims(fleet.New(f.Snapshot, fleettest.Driver), &scrape.Result{}, fleet.Scope{}, time.Now())
	if want := "a claim with admin access has nothing of its own, so its use is not measured"; len(list.Items) != 1 || list.Items[0].Unknown != want {
		t.Errorf("%+v, want %q", list.Items, want)
	}
}
