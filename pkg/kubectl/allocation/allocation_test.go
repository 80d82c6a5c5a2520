// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

const (
	mig   = "mig.nvidia.com"
	whole = "gpu.nvidia.com"
	mps   = "mps.partage.dev"
)

// patient searches however busy the machine is.
const patient = time.Hour

func one(c *resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	return []*resourceapi.ResourceClaim{c}
}

// TestLike: nodes that differ in names and UUIDs only are searched once, others are not taken
// for them.
func TestLike(t *testing.T) {
	f := fleettest.New(t)
	for i := range 6 {
		f.AddNode(fmt.Sprint("node-", i), "h100-80-sxm", 2)
	}
	f.AddNode("a100", "a100-80", 2)
	f.Held("a", "one", "node-1", fleettest.Request(whole))
	f.Held("a", "two", "node-2", fleettest.Request(whole))
	for name, c := range map[string]struct {
		request  resourceapi.DeviceRequest
		searched int
	}{
		"idle, taken and the other board":   {fleettest.Request(mig, "device.attributes['gpu.nvidia.com'].architecture != 'x'"), 3},
		"a loop over attributes sees UUIDs": {fleettest.Request(whole, "device.attributes['gpu.nvidia.com'].exists(k, k == 'uuid')"), 7},
		"UUIDs by name":                     {fleettest.Request(whole, "device.attributes['gpu.nvidia.com'].uuid != 'x'"), 7},
		"UUIDs by a computed name":          {fleettest.Request(whole, "device.attributes['gpu.nvidia.com']['uu' + 'id'] != 'x'"), 7},
		"UUIDs by an optional name":         {fleettest.Request(whole, "device.attributes[?'gpu.nvidia.com'].?uuid.orValue('y') != 'x'"), 7},
		"UUIDs by another name of the map":  {fleettest.Request(whole, "cel.bind(a, device.attributes['gpu.nvidia.com'], a.uuid != 'x')"), 7},
	} {
		t.Run(name, func(t *testing.T) {
			searched := 0
			for _, a := range allocation.New(f.Snapshot).OnNodes(t.Context(), f.Nodes, one(f.Claim("a", "c", c.request))) {
				if a.Like == "" {
					searched++
				}
			}
			if searched != c.searched {
				t.Errorf("%d nodes were searched, want %d", searched, c.searched)
			}
		})
	}
}

// TestLikeByConstraints: nodes are alike whose devices have other values of what is compared, and not those where other devices have the same.
func TestLikeByConstraints(t *testing.T) {
	f := fleettest.New(t)
	f.AddPairs("pairs", "h100-nvl", 2)
	f.AddPairs("other pairs", "h100-nvl", 2)
	f.AddPairs("apart", "h100-nvl", 2)
	const domain = "nvlinkDomain"
	for _, s := range f.Slices {
		for i := range s.Spec.Devices {
			if *s.Spec.NodeName == "apart" {
				s.Spec.Devices[i].Attributes[domain] = resourceapi.DeviceAttribute{StringValue: &s.Name}
			}
		}
	}
	claim := f.Claim("a", "c", fleettest.Count(2, whole))
	claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName(fleettest.Driver + "/" + domain))}}
	answers := allocation.New(f.Snapshot).Within(patient).OnNodes(t.Context(), f.Nodes, one(claim))
	if answers[0].Verdict != allocation.Fits || answers[1].Like != "pairs" || answers[2].Like != "" || answers[2].Verdict != allocation.Refused {
		t.Errorf("%+v", answers)
	}
}

// TestFirstOfItsKind: of nodes that are the same the first is searched, however many are looked at at a time, so that an error names the same
// device every time.
func TestFirstOfItsKind(t *testing.T) {
	f := fleettest.New(t)
	for i := range 4 {
		f.AddNode(fmt.Sprint("n", i), "h100-80-sxm", 1)
	}
	claim := f.Claim("a", "c", fleettest.Request(whole, "device.attributes['gpu.nvidia.com'].nosuch == 'x'"))
	planner := allocation.New(f.Snapshot).Within(patient)
	for range 100 {
		for _, a := range planner.OnNodes(t.Context(), f.Nodes, one(claim)) {
			like := "n0"
			if a.Node == "n0" {
				like = ""
			}
			if a.Verdict != allocation.Failed || a.Like != like || !strings.Contains(a.Err.Error(), "/n0/") {
				t.Fatalf("%+v", a)
			}
		}
	}
}

// TestSelectsAnew: what was found while nobody waited any more says nothing to the next who asks.
func TestSelectsAnew(t *testing.T) {
	f := fleettest.New(t)
	node := f.AddNode("n", "h100-80-sxm", 1)
	numbers := "[" + strings.Repeat("1, ", 99) + "1]"
	expression := fmt.Sprintf("%s.all(x, %[1]s.all(y, x == y))", numbers)
	cluster := allocation.New(f.Snapshot).Cluster
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	for d := range cluster.Devices(node) {
		if _, err := cluster.Selects(stopped, expression, d); err == nil {
			t.Fatal("a context that has ended does not stop it")
		}
		if matches, err := cluster.Selects(t.Context(), expression, d); !matches || err != nil {
			t.Errorf("%t, %v", matches, err)
		}
		break
	}
}

// TestWithout: what ends is free, and what is tainted is not.
func TestWithout(t *testing.T) {
	f := fleettest.New(t)
	node := f.AddNode("n", "h100-80-sxm", 1)
	held := f.Held("a", "held", "n", fleettest.Request(whole))
	claim := f.Claim("a", "c", fleettest.Request(whole))
	p := allocation.New(f.Snapshot)
	f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(fleettest.Driver)},
		Taint:          resourceapi.DeviceTaint{Key: "maintenance", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}})
	tainted := allocation.New(f.Snapshot)
	for name, c := range map[string]struct {
		planner *allocation.Planner
		want    allocation.Verdict
	}{
		"as it is":            {p, allocation.Refused},
		"without the claim":   {p.Without(held), allocation.Fits},
		"tainted":             {tainted, allocation.Refused},
		"tainted, without it": {tainted.Without(held), allocation.Refused},
		"without any claim":   {p.Emptied().Without(held), allocation.Fits},
	} {
		if got := c.planner.OnNode(t.Context(), node, one(claim)); got.Verdict != c.want {
			t.Errorf("%s: %s, want %s", name, got.Verdict, c.want)
		}
	}
}

// TestTimeLimit: a search that takes too long is told from one that finds nothing, and from one
// that nobody waits for.
func TestTimeLimit(t *testing.T) {
	f := fleettest.New(t)
	for i := range 3 {
		f.AddNode(fmt.Sprint("n", i), "h100-80-sxm", 1)
	}
	claims := one(f.Claim("a", "c", fleettest.Request(whole)))
	impatient := allocation.New(f.Snapshot).Within(1)
	if got := impatient.OnNode(t.Context(), f.Nodes[0], claims); got.Verdict != allocation.TimedOut {
		t.Errorf("%s: %v", got.Verdict, got.Err)
	}
	verdicts := map[allocation.Verdict]int{}
	for _, a := range impatient.OnNodes(t.Context(), f.Nodes, claims) {
		verdicts[a.Verdict]++
	}
	if verdicts[allocation.TimedOut] == 0 || verdicts[allocation.Fits]+verdicts[allocation.Refused] != 0 {
		t.Errorf("%v", verdicts)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := allocation.New(f.Snapshot).OnNode(ctx, f.Nodes[0], claims); got.Verdict != allocation.NotSearched {
		t.Errorf("%s: %v", got.Verdict, got.Err)
	}
}

// BenchmarkFiveHundredNodes asks 500 nodes of eight GPUs, each in use in its own way.
func BenchmarkFiveHundredNodes(b *testing.B) {
	f := fleettest.New(b)
	f.AddNode("node-0", "h100-80-sxm", 8)
	template := f.Slices
	f.Slices, f.Nodes = nil, nil
	for i := range 500 {
		name := fmt.Sprint("node-", i)
		f.Nodes = append(f.Nodes, &corev1.Node{})
		f.Nodes[i].Name = name
		for _, s := range template {
			c := s.DeepCopy()
			c.Name, c.Spec.NodeName, c.Spec.Pool.Name = name+c.Name, &name, name
			f.Slices = append(f.Slices, c)
		}
		// Up to 24 partitions, which are different ones on each node.
		claim := f.Claim("a", name)
		claim.Status.Allocation = &resourceapi.AllocationResult{}
		for n := range i % 25 {
			devices := template[1+n%8].Spec.Devices
			claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
				Driver: fleettest.Driver, Pool: name, Device: devices[(7*i+n)%len(devices)].Name,
			})
		}
	}
	for _, c := range []struct {
		name    string
		request resourceapi.DeviceRequest
	}{
		{"fits", fleettest.Request(mig, fleettest.Profile("1g.10gb"))},
		{"misspelt", fleettest.Request(mig, fleettest.Profile("1g.1gb"))},
		{"nine", fleettest.Count(9, whole)},
	} {
		claims := one(f.Claim("a", "c", c.request))
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				p := allocation.New(f.Snapshot)
				if got := len(p.OnNodes(b.Context(), f.Nodes, claims)); got != 500 {
					b.Fatal(got)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/fleet")
		})
	}
}
