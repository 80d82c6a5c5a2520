// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/templates"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

var update = flag.Bool("update", false, "write the golden files")

// dgx is a node with eight H100, and the classes of the chart.
func dgx(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 8)
	return f
}

// with returns a fleet of one node.
func with(t *testing.T, board string, gpus int) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("n1", board, gpus)
	return f
}

// shared is an A100 as seven partitions for four claims each.
func shared(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNodeOf("n1", factsOfBoard(t, "a100-80", true), device.Terms{Policy: &policy.Policy{Default: policy.Offer{Partition: &policy.PartitionOffer{
		Profiles: []string{"3g.40gb"},
		Shares:   []policy.PartitionShares{{Profiles: []string{"1g.10gb"}, TimeSlice: &policy.TimeSliceOffer{Clients: 4, MemoryOvercommit: 1}}},
	}}}})
	return f
}

// limited is an L4 on a node with an interposer library.
func limited(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNodeOf("n1", factsOfBoard(t, "l4", false), device.Terms{Policy: policy.Builtin(), Limited: true})
	return f
}

// old is a GPU before Volta, which has no MPS.
func old(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	facts := factsOfBoard(t, "t4", false)
	facts.GPUs[0].ProductName, facts.GPUs[0].Architecture, facts.GPUs[0].ComputeCapability = "Tesla P100-PCIE-16GB", "Pascal", gpu.Version{Major: 6}
	f.AddNodeOf("n1", facts, device.Terms{Policy: policy.Builtin()})
	return f
}

// mixed has three models.
func mixed(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := dgx(t)
	f.AddPartitionedNode("n2", "a30", 2)
	f.AddNode("n3", "t4", 4)
	return f
}

// goldens are queries with their fleets; each rule has one at least.
var goldens = []struct {
	name, rule string
	mechanism  Mechanism
	fleet      func(*testing.T) *fleettest.Fleet
	flags      string
}{
	{"D1-regulated", "D1", Partition, dgx, "--model-size 7B --trust regulated --latency p99-ms --count 2 --price 3.25"},
	{"D1-without-mig", "D1", Whole, func(t *testing.T) *fleettest.Fleet { return with(t, "l4", 2) }, "--memory 6Gi --trust other-tenants"},
	{"D1-guaranteed", "D1", Partition, dgx, "--model-size 13B --image registry.example.com/llm:1"},
	{"D2-small-model", "D2", MPS, dgx, "--model-size 1.5B --count 4 --price 3.25"},
	{"D2-mpi", "D2", MPS, dgx, "--workload mpi --count 8"},
	{"D3-notebook", "D3", TimeSlice, func(t *testing.T) *fleettest.Fleet { return with(t, "t4", 2) }, "--workload notebook --memory 3Gi --count 5"},
	{"D3-ci", "D3", TimeSlice, dgx, "--workload ci"},
	{"D3-bursty", "D3", TimeSlice, dgx, "--model-size 7B --quantized --traffic bursty"},
	{"D4-trusted", "D4", MPS, dgx, "--model-size 7B --quantized --latency p99-ms"},
	{"D4-large", "D4", MPS, func(t *testing.T) *fleettest.Fleet { return with(t, "l4", 2) }, "--memory 9Gi --latency p99-ms --count 4"},
	{"D5-training", "D5", Whole, dgx, "--workload training"},
	{"D5-training-model", "D5", Whole, dgx, "--workload training --model-size 7B"},
	{"D5-unquantized", "D5", Whole, dgx, "--model-size 34B"},
	{"D5-large-model", "D5", Whole, dgx, "--model-size 70B"},
	{"D6-software-limits", "D6", SoftwareLimits, limited, "--workload notebook --memory 4Gi"},
	{"D7-pascal", "D7", TimeSlice, old, "--memory 2Gi"},
	{"D8-density", "D8", PartitionTimeSlice, shared, "--workload notebook --memory 2Gi --count 28"},
	{"D9-mixed-models", "D1", Partition, mixed, "--memory 5Gi --trust other-tenants --count 3"},
	{"D10-replicas", "D1", Partition, dgx, "--model-size 7B --count 6"},
}

// query is that of some flags.
func query(t *testing.T, args string) Query {
	t.Helper()
	f, c := &adviseFlags{}, &cobra.Command{}
	f.add(c)
	if err := errors.Join(c.ParseFlags(strings.Fields(args)), f.check(c.Flags())); err != nil {
		t.Fatal(err)
	}
	return f.Query
}

// TestAdvise compares what is advised with golden files, and lets the scheduler's allocator
// allocate the manifest's claims, all replicas at once.
func TestAdvise(t *testing.T) {
	rules := map[string]bool{}
	for _, g := range goldens {
		t.Run(g.name, func(t *testing.T) {
			q := query(t, g.flags)
			f := g.fleet(t)
			a, err := Advise(q, fleet.New(f.Snapshot, fleettest.Driver))
			if err != nil {
				t.Fatal(err)
			}
			if a.Rule.ID != g.rule || a.Mechanism != g.mechanism {
				t.Errorf("rule %s, %s; want %s, %s", a.Rule.ID, a.Mechanism, g.rule, g.mechanism)
			}
			rules[a.Rule.ID] = true
			for _, n := range a.Notes {
				rules[n.ID] = true
			}
			var text bytes.Buffer
			if err := a.write(&text, printer.Format{}); err != nil {
				t.Fatal(err)
			}
			golden(t, g.name+".txt", text.String())
			checkTexts(t, text.String())
			claims := claimsOf(t, "manifest", []byte(a.Manifest))
			if len(claims) != 1 {
				t.Fatalf("the manifest has %d claims, want 1", len(claims))
			}
			var names []string
			for range q.Count {
				names = append(names, allocate(t, f, claims[0])...)
			}
			if int64(len(names)) != a.Request.Count*int64(q.Count) {
				t.Errorf("%d devices were allocated, want %d for each of %d", len(names), a.Request.Count, q.Count)
			}
		})
	}
	for i := 1; i <= 10; i++ {
		if id := fmt.Sprint("D", i); !rules[id] {
			t.Errorf("no golden file is about rule %s", id)
		}
	}
	files, err := filepath.Glob("testdata/D*.txt")
	if err != nil || len(files) != len(goldens) {
		t.Errorf("%d golden files for %d queries (%v)", len(files), len(goldens), err)
	}
}

// checkTexts looks for what others say of GPU sharing that does not hold for Partage.
func checkTexts(t *testing.T, text string) {
	t.Helper()
	plain := strings.ToLower(strings.Join(strings.Fields(text), " "))
	for _, banned := range doNotRepeat {
		if strings.Contains(plain, banned) {
			t.Errorf("the advice says %q", banned)
		}
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	fleettest.Golden(t, *update, name, got)
}

// decoder refuses unknown and repeated fields. To make one takes a while.
var decoder = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// claimsOf decodes a manifest strictly and returns its claims, and those of its templates, with
// the API's defaults.
func claimsOf(t *testing.T, name string, manifest []byte) []*resourceapi.ResourceClaim {
	t.Helper()
	var claims []*resourceapi.ResourceClaim
	for document := range strings.SplitSeq(string(manifest), "\n---\n") {
		o, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, document)
		}
		claims = append(claims, claimIn(o)...)
	}
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			r := c.Spec.Devices.Requests[i].Exactly
			r.AllocationMode = resourceapi.DeviceAllocationModeExactCount
			r.Count = max(1, r.Count)
		}
	}
	return claims
}

func claimIn(o runtime.Object) []*resourceapi.ResourceClaim {
	switch o := o.(type) {
	case *resourceapi.ResourceClaim:
		return []*resourceapi.ResourceClaim{o}
	case *resourceapi.ResourceClaimTemplate:
		return []*resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{Name: o.Name}, Spec: o.Spec.Spec}}
	}
	return nil
}

// allocate lets a new claim be allocated on any node and keeps it. It returns the devices.
func allocate(t *testing.T, f *fleettest.Fleet, like *resourceapi.ResourceClaim) []string {
	t.Helper()
	planner := allocation.New(f.Snapshot)
	c := f.Claim("team", fmt.Sprint("claim-", len(f.Claims)), like.Spec.Devices.Requests...)
	for _, n := range planner.Cluster.Nodes {
		a := planner.OnNode(context.Background(), n, []*resourceapi.ResourceClaim{c})
		if a.Verdict != allocation.Fits {
			continue
		}
		var devices []string
		for _, r := range a.Results[0].Devices.Results {
			devices = append(devices, r.Device)
		}
		c.Status.Allocation = &a.Results[0]
		return devices
	}
	t.Errorf("claim %s fits on no node", c.Name)
	return nil
}

// TestLatencyForFaults: that a latency moves a workload to weaker isolation of faults is said, and nothing of the kind where it does not.
func TestLatencyForFaults(t *testing.T) {
	const moved = "Because of --latency p99-ms this is an MPS share and not a MIG partition"
	for name, c := range map[string]struct {
		fleet func(*testing.T) *fleettest.Fleet
		flags string
		want  bool
	}{
		"from a partition":           {dgx, "--model-size 7B --quantized --latency p99-ms", true},
		"without a latency":          {dgx, "--model-size 7B --quantized", false},
		"shared anyway":              {dgx, "--model-size 1.5B --latency p99-ms", false},
		"a partition all the same":   {dgx, "--model-size 7B --trust regulated --latency p99-ms", false},
		"no partition could be had":  {func(t *testing.T) *fleettest.Fleet { return with(t, "l4", 2) }, "--memory 9Gi --latency p99-ms", false},
		"nor one that is not shared": {dgx, "--workload notebook --latency p99-ms", false},
	} {
		q := query(t, c.flags)
		a, err := Advise(q, fleet.New(c.fleet(t).Snapshot, fleettest.Driver))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(strings.Join(a.Warnings, " "), moved); got != c.want {
			t.Errorf("%s: %s, warnings %q, want %t", name, a.Mechanism, a.Warnings, c.want)
		}
	}
}

// TestTemplates: the claims of all templates fit on a node with eight H100, all at once.
func TestTemplates(t *testing.T) {
	f := dgx(t)
	names, err := templates.Names()
	if err != nil || len(names) < 10 {
		t.Fatalf("%d templates, %v", len(names), err)
	}
	allocated := map[string][]string{}
	for _, name := range names {
		data, err := templates.Read(name)
		if err != nil {
			t.Fatal(err)
		}
		if templates.IsValues(name) {
			continue
		}
		for _, c := range claimsOf(t, name, templates.Body(data)) {
			allocated[c.Name] = allocate(t, f, c)
		}
	}
	// The scheduler takes the smallest partition with the memory, and two GPUs for a training.
	for claim, want := range map[string]string{
		"whole-gpu": "gpu-", "partition-by-profile": "-mig-1g10gb-", "partition-by-memory": "-mig-1g10gb-", "mps-share": "-mps",
		"time-slice-share": "-timeslice", "several-pods": "-mig-1g10gb-", "inference": "-mig-1g20gb-", "inference-small-models": "-mps",
		"training": "gpu-", "ci": "-timeslice", "mpi": "-mps", "notebook": "-timeslice",
	} {
		devices := allocated[claim]
		number := 1
		if claim == "training" {
			number = 2
		}
		if len(devices) != number || !strings.Contains(devices[0], want) {
			t.Errorf("%s got %v, want %d with %q", claim, devices, number, want)
		}
	}
	if len(allocated) != 12 {
		t.Errorf("%d claims were allocated, want 12", len(allocated))
	}
}

// TestOffersOfOneProduct: GPUs of one model that are offered differently have their own room, and
// are one model; devices that are tainted are not offered.
func TestOffersOfOneProduct(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "a100-80", 2)
	f.AddPartitionedNode("n2", "a100-80", 3)
	f.AddPartitionedNode("n3", "a100-80", 1)
	for _, s := range f.Slices {
		if *s.Spec.NodeName != "n3" {
			continue
		}
		for i := range s.Spec.Devices {
			s.Spec.Devices[i].Taints = append(s.Spec.Devices[i].Taints, resourceapi.DeviceTaint{Key: "gpu.nvidia.com/gpu-lost", Effect: resourceapi.DeviceTaintEffectNoSchedule})
		}
	}
	m := fleet.New(f.Snapshot, fleettest.Driver)
	offers, err := offersOf(m)
	if err != nil {
		t.Fatal(err)
	}
	all := candidates(m, offers, 9<<30)
	for mechanism, want := range map[Mechanism]int{Partition: 3 * 7, Whole: 2, MPS: 2 * 4} {
		if all[mechanism].room != want {
			t.Errorf("%s: room for %d, want %d", mechanism, all[mechanism].room, want)
		}
	}
	if got := fleetOf(offers, all, 9<<30).Models; got != 1 {
		t.Errorf("%d models, want 1", got)
	}
	q := query(t, "--memory 9Gi --trust regulated --count 22")
	a, err := Advise(q, m)
	if err != nil || !slices.Equal(a.Request.GPUs, []string{"NVIDIA A100-SXM4-80GB"}) || !slices.ContainsFunc(a.Warnings, func(w string) bool { return strings.Contains(w, "room for 21 of the 22 replicas") }) {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestOneProfile: the only profile that is offered beside whole GPUs is a part of them.
func TestOneProfile(t *testing.T) {
	f := fleettest.New(t)
	f.AddNodeOf("n1", factsOfBoard(t, "h100-80-sxm", false), device.Terms{Policy: &policy.Policy{Default: policy.Offer{
		Whole: true, Partition: &policy.PartitionOffer{Profiles: []string{"1g.10gb"}},
	}}})
	m := fleet.New(f.Snapshot, fleettest.Driver)
	if a, err := Advise(query(t, "--memory 9Gi --trust regulated"), m); err != nil || a.Mechanism != Partition {
		t.Errorf("%+v, %v", a, err)
	}
	m.Nodes[0].Incomplete = true
	if a, err := Advise(query(t, "--memory 9Gi --trust regulated"), m); err == nil || !strings.Contains(err.Error(), "not known") {
		t.Errorf("slices are missing, so that it is not known what is offered: %+v, %v", a, err)
	}
}

// TestMissingClass: a mechanism without its class is not advised, and the answer says why.
func TestMissingClass(t *testing.T) {
	f := dgx(t)
	f.Classes = slices.DeleteFunc(f.Classes, func(c *resourceapi.DeviceClass) bool { return c.Name == manifest.ClassOf("mig") })
	q := query(t, "--memory 9Gi --trust regulated")
	a, err := Advise(q, fleet.New(f.Snapshot, fleettest.Driver))
	if err != nil || a.Mechanism != Whole {
		t.Fatalf("%+v, %v", a, err)
	}
	n := slices.IndexFunc(a.Alternatives, func(x Alternative) bool { return x.Mechanism == Partition })
	if n < 0 || a.Alternatives[n].Offered || !strings.Contains(a.Alternatives[n].Why, "no device class mig.nvidia.com") {
		t.Errorf("alternatives: %+v", a.Alternatives)
	}
	// Without the right to see classes nothing is said of them.
	f.Missing = []fleet.Missing{{Resource: "deviceclasses.resource.k8s.io", Err: errors.New("forbidden")}}
	if a, err = Advise(q, fleet.New(f.Snapshot, fleettest.Driver)); err != nil || a.Mechanism != Partition {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestNothingFits: the error names the rule, what it wants, and why that is not there.
func TestNothingFits(t *testing.T) {
	f := shared(t)
	q := query(t, "--workload training --count 1")
	_, err := Advise(q, fleet.New(f.Snapshot, fleettest.Driver))
	if err == nil || !strings.Contains(err.Error(), "rule D5") || !strings.Contains(err.Error(), "no GPU is offered as a whole") {
		t.Errorf("error: %v", err)
	}
	_, err = Advise(q, fleet.New(fleettest.New(t).Snapshot, fleettest.Driver))
	if err == nil || !strings.Contains(err.Error(), "is the driver installed") {
		t.Errorf("a cluster without GPUs: %v", err)
	}
}

// TestOtherDriver: selectors are about the attributes of the driver that was named.
func TestOtherDriver(t *testing.T) {
	m := fleet.New(dgx(t).Snapshot, fleettest.Driver)
	m.Driver = "gpu.example.com"
	a, err := Advise(query(t, "--model-size 7B"), m)
	if err != nil || !strings.Contains(a.Manifest, "device.attributes['gpu.example.com'].profile == '2g.20gb'") {
		t.Errorf("%v\n%s", err, a.Manifest)
	}
}

// factsOfBoard returns what a node with one GPU of a board reports.
func factsOfBoard(t *testing.T, board string, mig bool) *gpu.Node {
	t.Helper()
	node, err := boards.Load(board)
	if err != nil {
		t.Fatal(err)
	}
	if mig {
		node.GPUs[0].MIG.Enabled = true
	}
	return node
}

// TestGPUsOfOneNode: a claim has devices of one node, so that GPUs of several do not add up.
func TestGPUsOfOneNode(t *testing.T) {
	apart := with(t, "h100-80-sxm", 1)
	apart.AddNode("n2", "h100-80-sxm", 1)
	q := query(t, "--model-size 70B")
	const want = "a replica needs 2 GPUs, and no node has as many"
	if _, err := Advise(q, fleet.New(apart.Snapshot, fleettest.Driver)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("two nodes with one GPU each: error %v, want one with %q", err, want)
	}
	if _, err := Advise(query(t, "--memory 3000Gi"), fleet.New(dgx(t).Snapshot, fleettest.Driver)); err == nil || !strings.Contains(err.Error(), "a claim has 32 devices at most") {
		t.Errorf("more GPUs than a claim can have: %v", err)
	}
	odd := with(t, "h100-80-sxm", 3)
	odd.AddNode("n2", "h100-80-sxm", 3)
	q.Count = 3
	a, err := Advise(q, fleet.New(odd.Snapshot, fleettest.Driver))
	if err != nil {
		t.Fatal(err)
	}
	const room = "The fleet has room for 2 of the 3 replicas"
	if !slices.ContainsFunc(a.Warnings, func(w string) bool { return strings.Contains(w, room) }) {
		t.Errorf("two nodes with three GPUs each: warnings %q, want one with %q", a.Warnings, room)
	}
}
