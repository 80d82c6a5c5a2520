// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

const gib = 1 << 30

// offering is all that a GPU can be, changed, for every GPU.
func offering(change func(o *policy.Offer)) Terms {
	p := policy.Builtin()
	p.Default.Partition.Variants = true
	change(&p.Default)
	return Terms{Policy: p}
}

// sharing adds shares of partitions to everything that a GPU can be.
func sharing(shares ...policy.PartitionShares) Terms {
	return offering(func(o *policy.Offer) { o.Partition.Shares = shares })
}

func mpsOf(clients int) *policy.MPSOffer {
	return &policy.MPSOffer{Clients: clients, MemoryOvercommit: 1, ComputeOvercommit: 1}
}

func timeSliceOf(clients int) *policy.TimeSliceOffer {
	return &policy.TimeSliceOffer{Clients: clients, MemoryOvercommit: 1}
}

// inventoryOf a node under terms that leave nothing to complain about.
func inventoryOf(t *testing.T, node *gpu.Node, terms Terms) *Inventory {
	t.Helper()
	i, problems := problemsOf(t, node, terms)
	for _, problem := range problems {
		t.Errorf("problem: %v", problem)
	}
	return i
}

func problemsOf(t *testing.T, node *gpu.Node, terms Terms) (*Inventory, []error) {
	t.Helper()
	i := must.Get(NewInventory(node, terms))(t)
	checkAPI(t, i.ResourceSlices(testOptions))
	return i, i.Problems()
}

func shortNames(devices []Device) []string {
	var out []string
	for _, d := range devices {
		out = append(out, shortName(d.Name))
	}
	return out
}

// inMiB lets a table read like a policy.
func inMiB(n int64) int64 { return n * mib }

// TestShareNumbers: the T4 has 15360 MiB, of which the driver keeps 450, the MPS server
// has 80 and each client's context 160. The 1g.10gb of the H100 has 9984 MiB, of which
// these are 36, 80 and 384.
func TestShareNumbers(t *testing.T) {
	tests := map[string]struct {
		board, device string
		terms         Terms
		want          Share
	}{
		"built-in, MPS": {"t4", "mps", Terms{}, Share{
			Clients: 4, MemoryBytes: inMiB(14190), MaxMemoryBytes: inMiB(14190), DefaultMemoryBytes: inMiB(3547), Percent: 100, DefaultPercent: 25,
		}},
		"built-in, time slices": {"t4", "timeslice", Terms{}, Share{Clients: 4, MemoryBytes: inMiB(14910), MaxMemoryBytes: inMiB(14910)}},
		"overcommitted": {"t4", "mps", offering(func(o *policy.Offer) {
			o.MPS = &policy.MPSOffer{Clients: 3, MemoryOvercommit: 1.5, ComputeOvercommit: 1.15, ReservedMemoryBytes: inMiB(14830 - 3*160 - 1001)}
		}), Share{
			Clients: 3, MemoryBytes: inMiB(1501), MaxMemoryBytes: inMiB(1001), DefaultMemoryBytes: inMiB(500), Percent: 115, DefaultPercent: 38,
		}},
		"so much that each may have all": {"t4", "mps", offering(func(o *policy.Offer) {
			o.MPS = &policy.MPSOffer{Clients: 2, MemoryOvercommit: 4, ComputeOvercommit: 3}
		}), Share{
			Clients: 2, MemoryBytes: inMiB(4 * 14510), MaxMemoryBytes: inMiB(14510), DefaultMemoryBytes: inMiB(14510), Percent: 300, DefaultPercent: 100,
		}},
		"twice the equal part": {"t4", "mps", offering(func(o *policy.Offer) {
			o.MPS = &policy.MPSOffer{Clients: 3, MemoryOvercommit: 1, ComputeOvercommit: 2, ClientPriority: policy.PriorityBelowNormal}
		}), Share{
			Clients: 3, MemoryBytes: inMiB(14350), MaxMemoryBytes: inMiB(14350), DefaultMemoryBytes: inMiB(4783), Percent: 200, DefaultPercent: 66,
			ClientPriority: policy.PriorityBelowNormal,
		}},
		"one client": {"t4", "mps", offering(func(o *policy.Offer) { o.MPS = mpsOf(1) }), Share{
			Clients: 1, MemoryBytes: inMiB(14670), MaxMemoryBytes: inMiB(14670), DefaultMemoryBytes: inMiB(14670), Percent: 100, DefaultPercent: 100,
		}},
		"less than a MiB is left over": {"t4", "mps", offering(func(o *policy.Offer) {
			o.MPS = &policy.MPSOffer{Clients: 1, MemoryOvercommit: 1, ComputeOvercommit: 1, ReservedMemoryBytes: inMiB(14830-160-2) + 1}
		}), Share{Clients: 1, MemoryBytes: inMiB(1), MaxMemoryBytes: inMiB(1), DefaultMemoryBytes: inMiB(1), Percent: 100, DefaultPercent: 100}},
		"time slices with an interval": {"t4", "timeslice", offering(func(o *policy.Offer) {
			o.TimeSlice = &policy.TimeSliceOffer{Clients: 10, Interval: policy.IntervalShort, MemoryOvercommit: 1.1}
		}), Share{Clients: 10, MemoryBytes: inMiB(16401), MaxMemoryBytes: inMiB(14910), Interval: policy.IntervalShort}},
		"time slices with limits": {"t4", "timeslice", Terms{Limited: true}, Share{
			Clients: 4, MemoryBytes: inMiB(14910), MaxMemoryBytes: inMiB(14910), DefaultMemoryBytes: inMiB(3727), Percent: 100, DefaultPercent: 25, Limited: true,
		}},
		"more of them than percents": {"t4", "timeslice", func() Terms {
			terms := offering(func(o *policy.Offer) { o.TimeSlice = timeSliceOf(200) })
			terms.Limited = true
			return terms
		}(), Share{
			Clients: 200, MemoryBytes: inMiB(14910), MaxMemoryBytes: inMiB(14910), DefaultMemoryBytes: inMiB(74), Percent: 200, DefaultPercent: 1, Limited: true,
		}},
		"MPS on a partition": {"h100-80-sxm", "1g10gb-6-mps", sharing(policy.PartitionShares{Profiles: []string{"1g.10gb"}, MPS: mpsOf(2)}), Share{
			Base: "gpu-0000-1b-00-0-mig-1g10gb-6", Clients: 2, MemoryBytes: inMiB(9100), MaxMemoryBytes: inMiB(9100), DefaultMemoryBytes: inMiB(4550),
			Percent: 100, DefaultPercent: 50,
		}},
		"time slices on a partition": {"h100-80-sxm", "1g10gb-6-timeslice", sharing(policy.PartitionShares{Profiles: []string{"1g.10gb"},
			TimeSlice: &policy.TimeSliceOffer{Clients: 2, MemoryOvercommit: 1, Interval: policy.IntervalLong}}),
			Share{Base: "gpu-0000-1b-00-0-mig-1g10gb-6", Clients: 2, MemoryBytes: inMiB(9948), MaxMemoryBytes: inMiB(9948)}},
		"numbers that are not there": {"t4", "mps", offering(func(o *policy.Offer) { o.MPS = &policy.MPSOffer{} }), Share{
			Clients: 1, MemoryBytes: inMiB(14670), MaxMemoryBytes: inMiB(14670), DefaultMemoryBytes: inMiB(14670), Percent: 100, DefaultPercent: 100,
		}},
		"what the policy knows better": {"t4", "mps", offering(func(o *policy.Offer) {
			o.MPS = mpsOf(2)
			o.MPS.ServerMemoryBytes, o.MPS.ContextMemoryBytes = new(inMiB(28)-1), new(inMiB(499)+1)
		}), Share{
			Clients: 2, MemoryBytes: inMiB(14910 - 28 - 2*500), MaxMemoryBytes: inMiB(14910 - 28 - 2*500), DefaultMemoryBytes: inMiB(6941),
			Percent: 100, DefaultPercent: 50,
		}},
		"no allowance": {"t4", "mps", offering(func(o *policy.Offer) {
			o.MPS = mpsOf(2)
			o.MPS.ServerMemoryBytes, o.MPS.ContextMemoryBytes = new(int64), new(int64)
		}), Share{
			Clients: 2, MemoryBytes: inMiB(14910), MaxMemoryBytes: inMiB(14910), DefaultMemoryBytes: inMiB(7455), Percent: 100, DefaultPercent: 50,
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.want.Base == "" {
				tc.want.Base = "gpu-0000-1b-00-0"
			}
			if tc.want.Interval == "" {
				tc.want.Interval = policy.IntervalDefault
			}
			for _, d := range inventoryOf(t, loadNode(t, tc.board), tc.terms).Devices() {
				if shortName(d.Name) == tc.device {
					expect.Same(t, d.Share, &tc.want, "share")
					return
				}
			}
			t.Error("it is not published")
		})
	}
}

// TestShareProblems: what the hardware does not have of what the policy wants is
// told once for each GPU, and the rest is published.
func TestShareProblems(t *testing.T) {
	rule := func(change func(o *policy.Offer)) Terms {
		p := policy.Builtin()
		r := policy.Rule{Name: "as-told", Match: policy.Match{ProductName: "*"}, Offer: policy.Builtin().Default}
		change(&r.Offer)
		p.Rules = []policy.Rule{r}
		return Terms{Policy: p}
	}
	only := func(o policy.Offer) Terms { return rule(func(was *policy.Offer) { *was = o }) }
	tests := map[string]struct {
		board    string
		terms    Terms
		problems []string
		devices  int
	}{
		"more MPS clients than the GPU takes": {"l4", rule(func(o *policy.Offer) { o.MPS.Clients = 96 }),
			[]string{`MPS shares of the GPU: the policy's rule "as-told" asks for 96 clients, the hardware takes 48 at most; 48 are offered`}, 3},
		"more than a partition takes": {"h100-80-sxm", sharing(
			policy.PartitionShares{Profiles: []string{"1g.10gb", "3g.40gb"}, MPS: mpsOf(8)}),
			[]string{`MPS shares of profile 1g.10gb: the policy's default asks for 8 clients, the hardware takes 5 at most; 5 are offered`}, 28 + 7 + 2},
		"more reserved than there is": {"l4", rule(func(o *policy.Offer) { o.MPS.ReservedMemoryBytes = 1 << 50 }),
			[]string{`MPS shares of the GPU: the policy's rule "as-told" leaves no memory for clients: of 22534 MiB, 80 are for the MPS server, 1073741824 are reserved, and each client's context has 384; none are published`}, 2},
		"more reserved than a partition has": {"h100-80-sxm", sharing(policy.PartitionShares{
			Profiles: []string{"1g.10gb", "3g.40gb"}, MPS: &policy.MPSOffer{Clients: 2, ReservedMemoryBytes: 10 * gib}, TimeSlice: timeSliceOf(2)}),
			[]string{`MPS shares of profile 1g.10gb: the policy's default leaves no memory for clients: of 9948 MiB, 80 are for the MPS server, 10240 are reserved`}, 28 + 7 + 2*2},
		"more contexts than fit": {"l4", rule(func(o *policy.Offer) { o.MPS.Clients, o.MPS.ContextMemoryBytes = 16, new(int64(2*gib)) }),
			[]string{`MPS shares of the GPU: the policy's rule "as-told" asks for 16 clients, the memory is enough for 10: of 22534 MiB, 80 are for the MPS server, 0 are reserved, and each client's context has 2048; 10 are offered`}, 3},
		"profiles of another model": {"a100-80-mig", rule(func(o *policy.Offer) {
			o.Partition.Profiles = []string{"1g.10gb", "1g.5gb"}
			o.Partition.Shares = []policy.PartitionShares{{Profiles: []string{"3g.40gb", "3g.20gb"}, MPS: mpsOf(2)}}
		}), nil, 7 + 2},
		"the default may name profiles of all models": {"a100-80-mig",
			offering(func(o *policy.Offer) { o.Partition.Profiles = []string{"1g.10gb", "1g.5gb"} }), nil, 7},
		"also for shares of partitions": {"a30-mig", sharing(policy.PartitionShares{Profiles: []string{"1g.5gb"}, MPS: mpsOf(2)}), nil, 13},
		"unless the GPU has none of them": {"a100-80-mig",
			offering(func(o *policy.Offer) { o.Partition.Profiles = []string{"1g.6gb", "1g.5gb"} }),
			[]string{`nothing is published: MIG is on and needs a reset of the GPU to change, and it can be nothing of what the policy's default offers (gpu; mig 1g.6gb, 1g.5gb; `}, 0},
		"profiles for a GPU without MIG": {"t4", rule(func(o *policy.Offer) { o.Partition.Profiles = []string{"1g.6gb"} }), nil, 3},
		"partitions without MIG": {"t4", only(policy.Offer{Partition: &policy.PartitionOffer{}}),
			[]string{`nothing is published: the GPU has no MIG, and it can be nothing of what the policy's rule "as-told" offers (mig all profiles but variants)`}, 0},
		"partitions with MIG off": {"a100-80", only(policy.Offer{Partition: &policy.PartitionOffer{}}),
			[]string{`nothing is published: MIG is off and needs a reset of the GPU to change`}, 0},
		"shares with MIG on": {"a100-80-mig", only(policy.Offer{MPS: mpsOf(4)}),
			[]string{`nothing is published: MIG is on and needs a reset of the GPU to change`}, 0},
		"no partition on a GPU that could": {"h100-80-sxm", only(policy.Offer{Partition: &policy.PartitionOffer{Profiles: []string{}}}),
			[]string{`nothing is published: MIG follows the claims`}, 0},
		"nothing at all": {"h100-80-sxm", only(policy.Offer{}), nil, 0},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			i, problems := problemsOf(t, loadNode(t, tc.board), tc.terms)
			if len(problems) != len(tc.problems) {
				t.Fatalf("problems %v, want %q", problems, tc.problems)
			}
			for n, want := range tc.problems {
				if got := problems[n].Error(); !strings.HasPrefix(got, "GPU 0000:1b:00.0: "+want) {
					t.Errorf("problem %q, want %q", got, want)
				}
			}
			if got := len(i.Devices()); got != tc.devices {
				t.Errorf("%d devices, want %d: %v", got, tc.devices, names(i.Devices()))
			}
		})
	}
}

// TestOldHardware: MPS can limit nothing before Volta, which is nobody's mistake.
func TestOldHardware(t *testing.T) {
	node := loadNode(t, "t4")
	node.GPUs[0].ComputeCapability = gpu.Version{Major: 6, Minor: 1}
	expect.Same(t, shortNames(inventoryOf(t, node, Terms{}).Devices()), []string{"whole", "timeslice"}, "devices")
}

// TestSharesOfUnknownMemory: without limits a time slice needs no memory to divide.
func TestSharesOfUnknownMemory(t *testing.T) {
	node := loadNode(t, "t4")
	node.GPUs[0].Resources = gpu.Resources{}
	for limited, want := range map[bool][]string{false: {"whole", "timeslice"}, true: {"whole"}} {
		i, problems := problemsOf(t, node, Terms{Limited: limited})
		if diff := cmp.Diff(want, shortNames(i.Devices())); diff != "" || len(problems) != 1+oneIf(limited) {
			t.Errorf("limited %t: problems %v, devices (-want +got):\n%s", limited, problems, diff)
		}
		for _, problem := range problems {
			if !strings.Contains(problem.Error(), "the driver does not report the GPU's memory") {
				t.Errorf("limited %t: problem %v", limited, problem)
			}
		}
	}
}

// TestOffers: which devices there are is the policy's to say, in one order.
func TestOffers(t *testing.T) {
	both := policy.PartitionShares{Profiles: []string{"3g.40gb", "4g.40gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)}
	tests := map[string]struct {
		offer policy.Offer
		want  []string
	}{
		"nothing":                  {policy.Offer{}, nil},
		"whole GPUs":               {policy.Offer{Whole: true}, []string{"whole"}},
		"MPS":                      {policy.Offer{MPS: mpsOf(2)}, []string{"mps"}},
		"time slices":              {policy.Offer{TimeSlice: timeSliceOf(2)}, []string{"timeslice"}},
		"some profiles":            {policy.Offer{Partition: &policy.PartitionOffer{Profiles: []string{"7g.80gb", "3g.40gb"}}}, []string{"3g40gb-4", "3g40gb-0", "7g80gb-0"}},
		"shares of partitions":     {policy.Offer{Partition: &policy.PartitionOffer{Profiles: []string{}, Shares: []policy.PartitionShares{both}}}, []string{"3g40gb-4-mps", "3g40gb-4-timeslice", "3g40gb-0-mps", "3g40gb-0-timeslice", "4g40gb-0-mps", "4g40gb-0-timeslice"}},
		"one kind for one profile": {policy.Offer{Partition: &policy.PartitionOffer{Profiles: []string{"7g.80gb"}, Shares: []policy.PartitionShares{{Profiles: []string{"4g.40gb"}, TimeSlice: timeSliceOf(2)}, {Profiles: []string{"3g.40gb"}, MPS: mpsOf(2)}}}}, []string{"7g80gb-0", "3g40gb-4-mps", "3g40gb-0-mps", "4g40gb-0-timeslice"}},
		"a bit of everything": {
			policy.Offer{
				Whole: true, MPS: mpsOf(4), TimeSlice: timeSliceOf(4),
				Partition: &policy.PartitionOffer{Profiles: []string{"4g.40gb", "2g.20gb"}, Shares: []policy.PartitionShares{both}},
			},
			[]string{
				"2g20gb-4", "2g20gb-0", "2g20gb-2", "4g40gb-0", "whole",
				"3g40gb-4-mps", "3g40gb-4-timeslice", "3g40gb-0-mps", "3g40gb-0-timeslice", "4g40gb-0-mps", "4g40gb-0-timeslice",
				"mps", "timeslice",
			}},
	}
	counters := mustInventory(t, loadNode(t, "h100-80-sxm")).ResourceSlices(testOptions)[0].Spec.SharedCounters
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			i := inventoryOfOffer(t, tc.offer)
			expect.Same(t, shortNames(i.Devices()), tc.want, "devices")
			for _, d := range i.Devices() {
				if d.Exclusive() == (d.Kind == MPS || d.Kind == TimeSlice) || (d.Partition == nil) == strings.Contains(d.Name, "-mig-") {
					t.Errorf("device %+v", d)
				}
				if got, ok := i.Lookup(d.Name); !ok || got != d {
					t.Errorf("%s is not found", d.Name)
				}
			}
			// Another policy does not change what an allocated device draws.
			objects := i.ResourceSlices(testOptions)
			if tc.want == nil {
				if len(objects) > 0 {
					t.Errorf("%d slices without devices", len(objects))
				}
				return
			}
			expect.Same(t, objects[0].Spec.SharedCounters, counters, "counters")
			all := map[string]resourceapi.Device{}
			for _, d := range devicesOf(mustInventory(t, loadNode(t, "h100-80-sxm")).ResourceSlices(testOptions)) {
				all[d.Name] = d
			}
			for _, d := range i.Devices() {
				base := d.Name
				if d.Share != nil {
					base = d.Share.Base
				}
				n := slices.IndexFunc(devicesOf(objects), func(other resourceapi.Device) bool { return other.Name == d.Name })
				expect.Same(t, devicesOf(objects)[n].ConsumesCounters, all[base].ConsumesCounters, d.Name+" draws")
			}
		})
	}
}

// inventoryOfOffer is one H100, with no complaint but that there is nothing.
func inventoryOfOffer(t *testing.T, offer policy.Offer) *Inventory {
	t.Helper()
	return inventoryOf(t, loadNode(t, "h100-80-sxm"), Terms{Policy: &policy.Policy{Default: offer}})
}

// TestRules: each GPU has its own offer.
func TestRules(t *testing.T) {
	node := replicate(loadNode(t, "h100-80-sxm"), 3)
	p := policy.Builtin()
	p.Rules = []policy.Rule{
		{Name: "first", Match: policy.Match{UUID: node.GPUs[0].UUID}, Offer: policy.Offer{MPS: mpsOf(3)}},
		{Name: "second", Match: policy.Match{UUID: node.GPUs[1].UUID}, Offer: policy.Offer{TimeSlice: timeSliceOf(5)}},
	}
	got := map[string]int{}
	for _, d := range inventoryOf(t, node, Terms{Policy: p}).Devices() {
		clients := 0
		if d.Share != nil {
			clients = d.Share.Clients
		}
		got[fmt.Sprint(d.GPU.PCIAddress, " ", d.Kind, " ", clients)]++
	}
	want := map[string]int{
		firstGPU + " gpu 0": 1, firstGPU + " mig 0": 18, firstGPU + " mps 4": 1, firstGPU + " timeslice 4": 1,
		secondGPU + " timeslice 5": 1, thirdGPU + " mps 3": 1,
	}
	expect.Same(t, got, want, "devices")
}

// TestOptions: what a cluster would drop is not published, and everything else draws on counters. Where the scheduler forgets
// what shares draw, a GPU has shares only if there is nothing else that they exclude.
func TestOptions(t *testing.T) {
	shares := sharing(policy.PartitionShares{Profiles: []string{"1g.10gb", "1g.6gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)})
	builtin := policy.Builtin().Default
	of := func(o policy.Offer) Terms { return Terms{Policy: &policy.Policy{Default: o}} }
	all, noShares, noPartitions, neither := Options{PartitionableDevices: true, ConsumableCapacity: true}, Options{PartitionableDevices: true},
		Options{ConsumableCapacity: true}, Options{}
	forgets := all
	forgets.NoShareCounters = true
	for name, tc := range map[string]struct {
		board                       string
		terms                       Terms
		options                     Options
		exclusive, shared, counters int
	}{
		"no MIG":                      {"t4", shares, all, 1, 2, 1},
		"no MIG, no shares":           {"t4", shares, noShares, 1, 0, 1},
		"no MIG, no counters":         {"t4", shares, noPartitions, 1, 0, 0},
		"no MIG, neither":             {"t4", shares, neither, 1, 0, 0},
		"MIG":                         {"h100-80-sxm", shares, all, 26, 16, 9},
		"MIG, no shares":              {"h100-80-sxm", shares, noShares, 26, 0, 9},
		"MIG, no counters":            {"h100-80-sxm", shares, noPartitions, 1, 0, 0},
		"MIG, neither":                {"h100-80-sxm", shares, neither, 1, 0, 0},
		"MIG that is on, no counters": {"a100-40-mig", Terms{}, noPartitions, 0, 0, 0},
		"forgets, whole and shares":   {"t4", of(builtin), forgets, 1, 0, 0},
		"forgets, everything":         {"h100-80-sxm", of(builtin), forgets, 19, 0, 9},
		"forgets, one kind":           {"t4", of(policy.Offer{TimeSlice: builtin.TimeSlice}), forgets, 0, 1, 0},
		"forgets, one kind with MIG":  {"h100-80-sxm", of(policy.Offer{MPS: builtin.MPS}), forgets, 0, 1, 0},
		"forgets, two kinds":          {"h100-80-sxm", of(policy.Offer{MPS: builtin.MPS, TimeSlice: builtin.TimeSlice}), forgets, 0, 1, 0},
		"forgets, partitions, a share": {
			"h100-80-sxm", of(policy.Offer{Partition: builtin.Partition, MPS: builtin.MPS}), forgets, 18, 0, 9,
		},
	} {
		tc.options.Driver, tc.options.Pool, tc.options.NodeName = testOptions.Driver, testOptions.Pool, testOptions.NodeName
		objects := inventoryOf(t, loadNode(t, tc.board), tc.terms).ResourceSlices(tc.options)
		checkAPI(t, objects)
		exclusive, shared := 0, 0
		for _, d := range devicesOf(objects) {
			shared += oneIf(d.AllowMultipleAllocations != nil)
			exclusive += oneIf(d.AllowMultipleAllocations == nil)
			expect.Same(t, len(d.ConsumesCounters), oneIf(tc.counters > 0), name+": "+d.Name+" draws on a counter")
		}
		if exclusive != tc.exclusive || shared != tc.shared || len(counterSet(objects)) != tc.counters {
			t.Errorf("%s: %d exclusive devices, %d shares and %d counters", name, exclusive, shared, len(counterSet(objects)))
		}
	}
}

// TestShareNames: they are valid and unique whatever the driver calls its profiles.
func TestShareNames(t *testing.T) {
	node := loadNode(t, "h100-80-sxm")
	g := &node.GPUs[0]
	g.PCIAddress = "0000abcd:1b:00.0"
	const free = validation.DNS1123LabelMaxLength - len("gpu-0000abcd-1b-00-0-mig--8-timeslice")
	for n, length := range []int{free, free + 1} {
		g.MIG.Profiles[n].Name = strings.Repeat("x", length)
	}
	i := inventoryOf(t, node, sharing(policy.PartitionShares{
		Profiles: []string{g.MIG.Profiles[0].Name, g.MIG.Profiles[1].Name}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2),
	}))
	seen, longest := map[string]bool{}, 0
	for _, d := range i.Devices() {
		if seen[d.Name] || len(validation.IsDNS1123Label(d.Name)) > 0 {
			t.Errorf("name %q", d.Name)
		}
		seen[d.Name] = true
		longest = max(longest, len(d.Name))
	}
	expect.Same(t, longest, validation.DNS1123LabelMaxLength, "length of the longest name")
}
