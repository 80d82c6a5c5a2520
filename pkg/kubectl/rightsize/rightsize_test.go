// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rightsize

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

const gib = 1 << 30

// machine is a fleet with one node, and what the driver measured there.
type machine struct {
	*fleettest.Fleet
	result scrape.Result
}

func newMachine(t *testing.T, board string, gpus int) *machine {
	t.Helper()
	m := &machine{Fleet: fleettest.New(t), result: scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}}
	m.AddNode("node-1", board, gpus)
	return m
}

// used adds a claim that had so much memory at most, and was so busy, if that is not negative.
func (m *machine) used(name string, r resourceapi.DeviceRequest, peak int64, busy float64) *resourceapi.ResourceClaim {
	c := m.Held("team", name, "node-1", r)
	told := scrape.Claim{
		ID:        scrape.ID{Namespace: "team", Name: name, Node: "node-1", Device: c.Status.Allocation.Devices.Results[0].Device},
		PeakBytes: &peak, Since: fleettest.Start.Add(time.Hour),
	}
	if busy >= 0 {
		told.Utilization = &busy
	}
	m.result.Claims[told.ID] = &told
	return c
}

// only returns what was told of the only claim.
func (m *machine) only() *scrape.Claim { return slices.Collect(maps.Values(m.result.Claims))[0] }

func (m *machine) compare(q Query) *SizeList {
	o := NewObservation()
	o.Add(&m.result)
	o.Add(&m.result)
	return m.compareWith(o, q)
}

func (m *machine) compareWith(o *Observation, q Query) *SizeList {
	q.Now = fleettest.Start.Add(5 * time.Hour)
	return Compare(fleet.New(m.Snapshot, fleettest.Driver), o, q)
}

// TestEnough: the smallest that holds what was used, with as much isolation.
func TestEnough(t *testing.T) {
	t.Parallel()
	whole, part := fleettest.Request("gpu.nvidia.com"), fleettest.Request("mig.nvidia.com", fleettest.Profile("3g.40gb"))
	share := fleettest.Share("mps.partage.dev", "40Gi", "50")
	turns := fleettest.Request("timeslice.partage.dev")
	for _, c := range []struct {
		name    string
		board   string
		request resourceapi.DeviceRequest
		peak    int64
		busy    float64
		q       Query
		want    string
	}{
		{"a little", "h100-80-sxm", whole, 2 * gib, 0.05, Query{}, "Smaller 1g.10gb"},
		{"memory decides", "h100-80-sxm", whole, 30 * gib, 0.05, Query{}, "Smaller 3g.40gb"},
		{"memory with headroom", "h100-80-sxm", whole, 39 * gib, 0.05, Query{Headroom: 0.1}, "Right"},
		{"multiprocessors decide", "h100-80-sxm", whole, 2 * gib, 0.4, Query{}, "Smaller 3g.40gb"},
		{"busy is not known", "h100-80-sxm", whole, 2 * gib, -1, Query{}, "Smaller 1g.10gb"},
		{"all of it", "h100-80-sxm", whole, 79 * gib, 1, Query{}, "Right"},
		{"a partition", "h100-80-sxm", part, 12 * gib, -1, Query{}, "Smaller 1g.20gb"},
		{"a partition that is full", "h100-80-sxm", part, 38 * gib, -1, Query{}, "Right"},
		{"no partitions are offered", "t4", whole, gib, 0.1, Query{}, "Right"},
		{"sharing is allowed", "t4", whole, gib, 0.1, Query{Sharing: true}, "Smaller mps 1Gi 10%"},
		{"sharing, and busy is not known", "t4", whole, gib, -1, Query{Sharing: true}, "Smaller mps 1Gi 25%"},
		{"a share of something busy", "h100-80-sxm", share, gib, -1, Query{}, "Smaller mps 1Gi 50%"},
		{"a share", "h100-80-sxm", share, 10 * gib, 0.5, Query{}, "Smaller mps 10Gi 25%"},
		{"a share that is full", "h100-80-sxm", share, 40 * gib, 1, Query{}, "Right"},
		{"a time slice", "h100-80-sxm", turns, gib, 0.1, Query{}, "Smaller 1g.10gb"},
		{"another namespace", "h100-80-sxm", whole, gib, 0, Query{Scope: fleet.Scope{Namespace: "other"}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, c.board, 1)
			m.used("claim", c.request, c.peak, c.busy)
			got := ""
			for _, s := range m.compare(c.q).Items {
				got = s.Verdict
				if s.Enough != nil {
					got += " " + s.Enough.String()
					if saved := s.Holds.GPUs - s.Enough.GPUs; saved <= 0 || saved != s.SavedGPUs {
						t.Errorf("saved %v of %+v", s.SavedGPUs, s.Holds)
					}
				}
			}
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

// TestOnlyWhatTheFleetOffers: a profile that no node has is not proposed, one of another node
// with the same GPUs is.
func TestOnlyWhatTheFleetOffers(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "h100-80-sxm", 1)
	m.used("claim", fleettest.Request("gpu.nvidia.com"), gib, 0)
	for _, s := range m.Slices {
		for i := range s.Spec.Devices {
			if a := s.Spec.Devices[i].Attributes; a != nil && a["type"].StringValue != nil && *a["type"].StringValue == "mig" && *a["profile"].StringValue != "4g.40gb" {
				a["type"] = resourceapi.DeviceAttribute{StringValue: new("other")}
			}
		}
	}
	if got := m.compare(Query{}).Items[0].Enough; got == nil || got.Profile != "4g.40gb" {
		t.Errorf("%+v", got)
	}
	m.AddNode("node-2", "h100-80-sxm", 1)
	if got := m.compare(Query{}).Items[0].Enough; got == nil || got.Profile != "1g.10gb" {
		t.Errorf("%+v", got)
	}
}

func TestUnknown(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "h100-80-sxm", 3)
	m.Held("team", "unseen", "node-1", fleettest.Request("gpu.nvidia.com"))
	m.used("blind", fleettest.Request("gpu.nvidia.com"), gib, 0)
	m.only().PeakBytes = nil
	gone := m.used("gone", fleettest.Request("gpu.nvidia.com"), gib, 0)
	gone.Status.Allocation.Devices.Results[0].Device = "gone"
	want := map[string]string{
		"unseen": "the driver on node node-1 has not prepared it, or has no pod there", "blind": "the driver does not report the claim's memory",
		"gone": "no ResourceSlice has the device any more",
	}
	got := map[string]string{}
	for _, s := range m.compare(Query{}).Items {
		if s.Verdict != Unknown || s.Enough != nil {
			t.Errorf("%+v", s)
		}
		got[s.Name] = s.Reason
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// example has what makes manifests change in different ways.
func example(t *testing.T) *machine {
	t.Helper()
	m := newMachine(t, "h100-80-sxm", 8)
	m.used("whole", fleettest.Request("gpu.nvidia.com"), 2*gib, 0.05)
	m.used("selective", fleettest.Request("mig.nvidia.com", "device.attributes['gpu.nvidia.com'].architecture == 'Hopper'", fleettest.Profile("3g.40gb")), 12*gib, -1)
	m.used("share", fleettest.Share("mps.partage.dev", "40Gi", "60"), 22*gib, 0.6)
	m.used("full", fleettest.Request("gpu.nvidia.com"), 79*gib, 1)
	m.Held("team", "unseen", "node-1", fleettest.Request("gpu.nvidia.com"))
	m.made(2*gib, 30*gib, 79*gib)
	return m
}

// made adds claims that were made from one template.
func (m *machine) made(peaks ...int64) {
	for i, peak := range peaks {
		c := m.used(fmt.Sprint("made-", i), fleettest.Request("gpu.nvidia.com"), peak, -1)
		pod := m.Pods[len(m.Pods)-1]
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("template")}}
		c.Annotations = map[string]string{podClaimName: "gpu"}
		c.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: new(true)}}
	}
}

// TestOneEdit: a template gets one edit, for the claim that needs the most.
func TestOneEdit(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "h100-80-sxm", 3)
	m.made(2*gib, 30*gib, 3*gib)
	for _, s := range m.compare(Query{}).Items {
		if want := s.Name == "made-1"; s.Verdict != Smaller || s.Reason != "" || (s.Change != nil) != want || want && !strings.Contains(s.Change.Diff, "3g.40gb") {
			t.Errorf("%+v", s)
		}
	}
}

func TestView(t *testing.T) {
	t.Parallel()
	list := example(t).compare(Query{Headroom: 0.1, Price: 3.25})
	for file, f := range map[string]printer.Format{"sizes.txt": {}, "sizes-wide.txt": {Wide: true}, "sizes-colour.txt": {Color: true}} {
		var out bytes.Buffer
		if err := list.View(true).Write(&out, f); err != nil {
			t.Fatal(err)
		}
		golden(t, file, out.String())
	}
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.Output = options.OutputYAML
	list.Items = list.Items[:2]
	if err := printer.Print(o, list, list.View(true)); err != nil {
		t.Fatal(err)
	}
	golden(t, "sizes.yaml", out.String())
}

// TestAlternative: of a request with alternatives the one that was chosen changes.
func TestAlternative(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "h100-80-sxm", 1)
	exactly := fleettest.Request("gpu.nvidia.com").Exactly
	r := resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "big", DeviceClassName: exactly.DeviceClassName, AllocationMode: exactly.AllocationMode, Count: 1},
	}}
	m.used("claim", r, gib, 0)
	m.Classes = nil
	c := m.compare(Query{}).Items[0].Change
	want := &Change{
		Path: "spec.devices.requests[gpu].firstAvailable",
		Diff: "  - allocationMode: ExactCount\n    count: 1\n-   deviceClassName: gpu.nvidia.com\n+   deviceClassName: mig.nvidia.com\n    name: big\n" +
			"+   selectors:\n+   - cel:\n+       expression: device.attributes['gpu.nvidia.com'].profile == '1g.10gb'\n",
		Notes: []string{`no DeviceClass mig.nvidia.com was seen: use one whose devices have the type "mig"`},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestConfiguration: one that the smaller device does not take would be refused with it.
func TestConfiguration(t *testing.T) {
	t.Parallel()
	const mps, priority = `"sharing":{"strategy":"MPS"}`, `"sharing":{"strategy":"MPS","mpsConfig":{"defaultClientPriority":"Normal"}}`
	whole, part := fleettest.Request("gpu.nvidia.com"), fleettest.Request("mig.nvidia.com", fleettest.Profile("3g.40gb"))
	for name, c := range map[string]struct {
		board, kind, sharing string
		request              resourceapi.DeviceRequest
		requests             []string
		want                 string
	}{
		"a partition for a GPU":      {"h100-80-sxm", "GpuConfig", mps, whole, nil, "change spec.devices.config[0], too: the smaller device of request gpu takes a MigDeviceConfig"},
		"named":                      {"h100-80-sxm", "GpuConfig", mps, whole, []string{"gpu"}, "change spec.devices.config[0], too: the smaller device of request gpu takes a MigDeviceConfig"},
		"of another request":         {"h100-80-sxm", "GpuConfig", mps, whole, []string{"other"}, ""},
		"of partitions already":      {"h100-80-sxm", "MigDeviceConfig", mps, part, nil, ""},
		"a share for a GPU":          {"t4", "GpuConfig", mps, whole, nil, "change spec.devices.config[0], too: the smaller device of request gpu takes no configuration but a defaultClientPriority"},
		"a share takes its priority": {"t4", "GpuConfig", priority, whole, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, c.board, 1)
			claim := m.used("claim", c.request, gib, 0.05)
			claim.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{Requests: c.requests, DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: fleettest.Driver, Parameters: runtime.RawExtension{
					Raw: fmt.Appendf(nil, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":%q,%s}`, c.kind, c.sharing),
				}},
			}}}
			change := m.compare(Query{Sharing: true}).Items[0].Change
			if change == nil || strings.Join(change.Notes, "\n") != c.want {
				t.Errorf("%+v", change)
			}
		})
	}
}

// TestObservation: the most of all looks counts, and what is not known is no zero.
func TestObservation(t *testing.T) {
	t.Parallel()
	o := NewObservation()
	id := scrape.ID{Name: "x"}
	for _, c := range []scrape.Claim{
		{ID: id}, {ID: id, PeakBytes: new(int64(5)), Utilization: new(0.2)}, {ID: id, UsedBytes: new(int64(7)), PeakBytes: new(int64(6)), Utilization: new(0.1)}, {ID: id},
	} {
		o.Add(&scrape.Result{Claims: map[scrape.ID]*scrape.Claim{c.ID: &c}})
	}
	if got := o.claims[id]; got.samples != 4 || *got.peak != 7 || *got.busy != 0.2 {
		t.Errorf("%+v", got)
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	f := newMachine(t, "h100-80-sxm", 2)
	c := f.Held("team", "claim-1", "node-1", fleettest.Request("mig.nvidia.com", fleettest.Profile("3g.40gb")))
	// The driver has measured a claim of a GPU that is not that of the board.
	told := strings.ReplaceAll(scrapetest.Everything(t), "gpu-0000-10-00-0-mig-1g10gb-4", c.Status.Allocation.Devices.Results[0].Device)
	client := scrapetest.Cluster(t, f.Snapshot, map[string]scrapetest.Response{"a": {Body: told}}, scrapetest.Pod("a", "node-1"))
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o := options.New(streams)
	o.AllNamespaces, o.Interval = true, time.Millisecond
	flags := Flags{Query: Query{Headroom: 0.1, Price: 2}, Watch: 20 * time.Millisecond}
	now := func() time.Time { return time.Unix(scrapetest.Started+3600, 0) }
	if err := Run(t.Context(), o, client, flags, now); err != nil || !strings.Contains(out.String(), "1g.10gb") || !strings.Contains(out.String(), "60m") {
		t.Errorf("%v, %s", err, out.String())
	}
	flags.Watch = 0
	o.Output = options.OutputName
	out.Reset()
	if err := Run(t.Context(), o, client, flags, now); err != nil || out.String() != "resourceclaim.resource.k8s.io/claim-1\n" {
		t.Errorf("%v, %s", err, out.String())
	}
	flags.Price = -1
	if err := Run(t.Context(), o, client, flags, now); err == nil {
		t.Error("a negative price is taken")
	}
	flags.Price = 0
	if err := Run(t.Context(), o, scrapetest.Cluster(t, f.Snapshot, nil), flags, now); err == nil || errors.Is(err, options.ErrFound) {
		t.Error(err)
	}
}

// TestNoAdvice: nothing is advised after a minute, for a claim that nobody can edit, or at the expense of another.
func TestNoAdvice(t *testing.T) {
	t.Parallel()
	whole := fleettest.Request("gpu.nvidia.com")
	for name, c := range map[string]struct {
		change  func(m *machine, c *resourceapi.ResourceClaim)
		least   time.Duration
		verdict string
		reason  string
		source  string
	}{
		"a minute": {least: 24 * time.Hour, verdict: Unknown, reason: "it was observed for 4h", source: "ResourceClaim"},
		"of an extended resource": {change: func(m *machine, c *resourceapi.ResourceClaim) {
			c.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
			m.Pods[0].Labels = map[string]string{"pod-template-hash": "5d4"}
			m.Pods[0].OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "train-5d4", Controller: new(true)}}
		}, verdict: Smaller, reason: "the scheduler made the claim", source: "Deployment"},
		"of a pod that is hidden": {change: func(m *machine, c *resourceapi.ResourceClaim) {
			c.Annotations = map[string]string{podClaimName: "gpu"}
			m.Pods = nil
		}, verdict: Smaller, reason: "which one is unknown", source: "ResourceClaim"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, "h100-80-sxm", 1)
			claim := m.used("train", whole, gib, 0.05)
			if c.change != nil {
				c.change(m, claim)
			}
			s := m.compare(Query{Least: c.least}).Items[0]
			if s.Verdict != c.verdict || s.Change != nil || !strings.Contains(s.Reason, c.reason) || s.Source.Kind != c.source {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestOneMoment: how busy a claim is at one moment says nothing of the time before, unless it has not worked in all of it.
func TestOneMoment(t *testing.T) {
	t.Parallel()
	for idle, want := range map[time.Duration]string{0: Unknown, 3 * time.Hour: Unknown, 5 * time.Hour: Smaller} {
		m := newMachine(t, "h100-80-sxm", 1)
		m.used("train", fleettest.Request("gpu.nvidia.com"), gib, 0)
		m.only().Idle = &idle
		o := NewObservation()
		o.Add(&m.result)
		if s := m.compareWith(o, Query{}).Items[0]; s.Verdict != want || want == Unknown && !strings.Contains(s.Reason, "--watch") {
			t.Errorf("idle for %s: %+v", idle, s)
		}
	}
}

// TestPercentStays: as many percent as a share has are as many of the same device.
func TestPercentStays(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n", "h100-80-sxm", 1)
	for d := range fleet.New(f.Snapshot, fleettest.Driver).Devices() {
		sm := d.Published.Capacity[fleet.CapacitySMPercent]
		for percent := int64(1); percent <= 100 && d.Type == fleet.TypeMPS; percent++ {
			n := needOf(&fleet.Holding{Device: d, Result: &resourceapi.DeviceRequestAllocationResult{
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{fleet.CapacitySMPercent: *resource.NewQuantity(percent, resource.DecimalSI)},
			}}, &observed{peak: new(int64(1))}, Query{})
			if got := n.percentOf(d, sm); got != percent {
				t.Errorf("%d percent become %d", percent, got)
			}
		}
	}
}
