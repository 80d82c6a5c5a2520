// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

func TestWhichDevices(t *testing.T) {
	tests := map[string]struct {
		board            string
		enabled, dynamic bool
		whole            bool
		partitions       int
	}{
		"without MIG":                   {board: "t4", whole: true},
		"Ampere, off":                   {board: "a100-40", whole: true},
		"Ampere, on":                    {board: "a100-40", enabled: true, partitions: 25},
		"Hopper, off":                   {board: "h100-80-sxm", dynamic: true, whole: true, partitions: 25},
		"Hopper, on":                    {board: "h100-80-sxm", dynamic: true, enabled: true, whole: true, partitions: 25},
		"Hopper in a vGPU guest, off":   {board: "h100-80-sxm", whole: true},
		"Hopper in a vGPU guest, on":    {board: "h100-80-sxm", enabled: true, partitions: 25},
		"A30, on":                       {board: "a30", enabled: true, partitions: 13},
		"RTX PRO, graphics and engines": {board: "rtx-pro-6000", dynamic: true, whole: true, partitions: 30},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			node := loadNode(t, tc.board)
			if mig := node.GPUs[0].MIG; mig != nil {
				mig.Enabled, mig.Dynamic = tc.enabled, tc.dynamic
			}
			whole, partitions, shares := false, 0, 0
			i := mustInventory(t, node)
			for _, d := range i.Devices() {
				switch {
				case d.Kind == Whole && d.Partition == nil && d.Exclusive() && d.Name == "gpu-0000-1b-00-0":
					whole = true
				case d.Kind == Partition && d.Partition != nil && d.Exclusive():
					partitions++
				case d.Kind == MPS && d.Partition == nil && !d.Exclusive() && d.Name == "gpu-0000-1b-00-0-mps",
					d.Kind == TimeSlice && d.Partition == nil && !d.Exclusive() && d.Name == "gpu-0000-1b-00-0-timeslice":
					shares++
				default:
					t.Errorf("device %+v", d)
				}
				if got, ok := i.Lookup(d.Name); !ok || got != d {
					t.Errorf("%s is not found", d.Name)
				}
			}
			if whole != tc.whole || partitions != tc.partitions || shares != 2*oneIf(tc.whole) {
				t.Errorf("whole %t, %d shares of it and %d partitions, want %t and %d", whole, shares, partitions, tc.whole, tc.partitions)
			}
			if _, ok := i.Lookup("gpu-0000-1b-00-0-mig-1g99gb-0"); ok {
				t.Error("found what is not there")
			}
		})
	}
}

// TestVariants: variants of profiles are published where the policy asks for them.
// One that somebody else made is there already.
func TestVariants(t *testing.T) {
	named := offering(func(o *policy.Offer) { o.Partition.Profiles = []string{"1g.10gb+me"} })
	without := offering(func(o *policy.Offer) { o.Partition.Profiles = []string{"1g.10gb"} })
	noPartitions := offering(func(o *policy.Offer) { o.Partition = nil })
	for name, tc := range map[string]struct {
		terms            Terms
		variants, static int
	}{
		"by default": {Terms{}, 0, 1}, "all": {everything, 7, 1}, "by name": {named, 7, 1}, "others by name": {without, 0, 0},
		"no partitions": {noPartitions, 0, 0},
	} {
		made := Status{Static: []Static{static(firstGPU, 20, at(2, 1), "MIG-1")}}
		variants, statics := 0, 0
		for _, d := range inventoryOf(t, loadNode(t, "h100-80-sxm"), tc.terms).With(made).Devices() {
			if d.Partition == nil || d.Partition.Profile.Name != "1g.10gb+me" {
				continue
			}
			statics += oneIf(d.Static != nil)
			variants += oneIf(d.Static == nil)
		}
		if variants != tc.variants || statics != tc.static {
			t.Errorf("%s: %d variants and %d static ones, want %d and %d", name, variants, statics, tc.variants, tc.static)
		}
	}
}

// TestOrderByWhatIsDestroyed: one large placement weighs more than several
// ways to use a small place.
func TestOrderByWhatIsDestroyed(t *testing.T) {
	at := func(start, size int) gpu.Placement { return gpu.Placement{Start: start, Size: size} }
	ordered := orderShapes([]PartitionShape{
		{gpu.Profile{ID: 1, Slices: 1}, at(7, 1)},
		{gpu.Profile{ID: 1, Slices: 1}, at(0, 1)},
		{gpu.Profile{ID: 2, Slices: 1}, at(0, 2)}, // with the next, costs 0:1 4
		{gpu.Profile{ID: 3, Slices: 2}, at(0, 2)},
		{gpu.Profile{ID: 4, Slices: 2}, at(0, 2)}, // a variant, counts once
		{gpu.Profile{ID: 5, Slices: 4}, at(3, 5)}, // costs 7:1 5
	})
	var got []int
	for _, s := range ordered {
		got = append(got, s.Placement.Start)
	}
	expect.Same(t, got, []int{0, 7, 0, 0, 0, 3}, "starts")
}

// TestOrderIgnoresListing: the driver may list profiles and placements in any
// order.
func TestOrderIgnoresListing(t *testing.T) {
	want := mustInventory(t, loadNode(t, "rtx-pro-6000"))
	node := loadNode(t, "rtx-pro-6000")
	slices.Reverse(node.GPUs[0].MIG.Profiles)
	for _, p := range node.GPUs[0].MIG.Profiles {
		slices.Reverse(p.Placements)
	}
	got := mustInventory(t, node)
	expect.Same(t, got.ResourceSlices(testOptions), want.ResourceSlices(testOptions), "slices")
}

func TestWrongFacts(t *testing.T) {
	if _, err := NewInventory(nil, Terms{}); err == nil {
		t.Error("no error without a node")
	}
	twice := replicate(loadNode(t, "t4"), 2)
	twice.GPUs[1].PCIAddress = twice.GPUs[0].PCIAddress
	if _, err := NewInventory(twice, Terms{}); err == nil {
		t.Error("no error for two GPUs at one address")
	}

	tests := map[string]struct {
		change  func(g *gpu.GPU)
		problem string
		devices int // of the H100, which has 28
	}{
		"address":                  {func(g *gpu.GPU) { g.PCIAddress = "1b:00.0" }, `GPU "1b:00.0"`, 0},
		"no profiles":              {func(g *gpu.GPU) { g.MIG.Profiles = nil }, "no MIG profiles", 3},
		"no profiles, fixed":       {func(g *gpu.GPU) { g.MIG = &gpu.MIG{Enabled: true} }, "no MIG profiles", 0},
		"placement beyond the end": {func(g *gpu.GPU) { g.MIG.Profiles[0].Placements[0].Size = 9 }, "not within the GPU's 8 memory slices", 27},
		"negative placement":       {func(g *gpu.GPU) { g.MIG.Profiles[0].Placements[0].Start = -1 }, "not within", 27},
		"empty placement":          {func(g *gpu.GPU) { g.MIG.Profiles[0].Placements[0].Size = 0 }, "not within", 27},
		"placement twice": {func(g *gpu.GPU) {
			p := &g.MIG.Profiles[1]
			p.Placements = append(p.Placements, gpu.Placement{Start: 0, Size: 2})
		}, "another placement there", 28},
		"profile ID twice":               {func(g *gpu.GPU) { g.MIG.Profiles[1].ID = 0 }, "another profile has its ID 0", 27},
		"too many memory slices":         {func(g *gpu.GPU) { placeEverywhere(g.MIG, 33) }, "no partitions are published", 3},
		"too many counters":              {func(g *gpu.GPU) { placeEverywhere(g.MIG, 32) }, "need 36 counters", 3},
		"memory that the driver manages": {func(g *gpu.GPU) { g.CoherentMemory = gpu.CoherentDriver }, "CoherentGPUMemoryMode=driver", 3},
		"memory that anyone may manage":  {func(g *gpu.GPU) { g.CoherentMemory = gpu.CoherentUnknown }, "cannot be read in /proc/driver/nvidia/params", 3},
		"absurd memory slices":           {func(g *gpu.GPU) { g.MIG.MemorySlices = 1 << 40 }, "no partitions are published", 3},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			node := replicate(loadNode(t, "h100-80-sxm"), 2)
			other := node.GPUs[1]
			own := *other.MIG
			own.Profiles = nil
			for _, p := range other.MIG.Profiles {
				p.Placements = slices.Clone(p.Placements)
				own.Profiles = append(own.Profiles, p)
			}
			node.GPUs[0].MIG = &own
			tc.change(&node.GPUs[0])
			i := must.Get(NewInventory(node, everything))(t)
			if problems := fmt.Sprint(i.Problems()); len(i.Problems()) != 1 || !strings.Contains(problems, tc.problem) ||
				!strings.Contains(problems, node.GPUs[0].PCIAddress) {
				t.Errorf("problems %s, want one with %q", problems, tc.problem)
			}
			// The other GPU has all of its own.
			if got := len(i.Devices()); got != 28+tc.devices {
				t.Errorf("%d devices, want %d", got, 28+tc.devices)
			}
			checkAPI(t, i.ResourceSlices(testOptions))
		})
	}
}

// placeEverywhere makes a GPU with so many memory slices, each with a place for the
// smallest profile.
func placeEverywhere(mig *gpu.MIG, slices int) {
	mig.MemorySlices = slices
	for n := range mig.Profiles {
		if p := &mig.Profiles[n]; p.Placements[0].Size == 1 {
			p.Placements = nil
			for start := range slices {
				p.Placements = append(p.Placements, gpu.Placement{Start: start, Size: 1})
			}
			p.MaxInstances = slices
		}
	}
}

// TestAbsurdNumbers: what a broken driver may say costs neither memory nor a
// crash.
func TestAbsurdNumbers(t *testing.T) {
	node := loadNode(t, "h100-80-sxm")
	for n := range node.GPUs[0].MIG.Profiles {
		p := &node.GPUs[0].MIG.Profiles[n]
		p.Resources.Multiprocessors = 1<<32 - 1
		p.Resources.OFAEngines = -1
		p.MaxInstances = -1
	}
	// Every partition wants all multiprocessors, so only one fits.
	checkCounters := furtherCounters(mustInventory(t, node))
	expect.Same(t, checkCounters, []string{"memory", "multiprocessors"}, "counters beside memory slices")
}

// crowded is a GPU with more profiles than fit into a slice.
func crowded(t *testing.T) *Inventory {
	t.Helper()
	node := loadNode(t, "h100-80-sxm")
	mig := node.GPUs[0].MIG
	variant := mig.Profiles[6] // 1g.10gb+me, 7 placements
	for n := range 7 {
		variant.ID = uint32(100 + n)
		variant.Name = fmt.Sprintf("1g.10gb+v%d", n)
		mig.Profiles = append(mig.Profiles, variant)
	}
	return must.Get(NewInventory(node, everything))(t)
}

// TestTooManyDevices: what does not fit into a slice is left out profile by
// profile, shares first and then variants, and said.
func TestTooManyDevices(t *testing.T) {
	i := crowded(t)
	// 1 + 25 + 7*7 is 75; 3 of the 7 variants fit into 64 without the 15 and the observer that are
	// kept free, and one kind of share.
	if len(i.Devices()) != 48 || len(i.Problems()) != 5 {
		t.Errorf("%d devices, problems %v", len(i.Devices()), i.Problems())
	}
	for _, name := range []string{
		"gpu-0000-1b-00-0", "gpu-0000-1b-00-0-mig-7g80gb-0", "gpu-0000-1b-00-0-mig-1g10gb-me-0", "gpu-0000-1b-00-0-mps",
	} {
		if _, ok := i.Lookup(name); !ok {
			t.Errorf("%s is left out", name)
		}
	}
	for n, problem := range i.Problems() {
		want := fmt.Sprintf("profile 1g.10gb+v%d is left out", 3+n)
		if n == 4 {
			want = "time-slice shares are left out"
		}
		if !strings.Contains(problem.Error(), want) {
			t.Errorf("problem %v, want %q", problem, want)
		}
	}
	checkAPI(t, i.ResourceSlices(testOptions))
}

// TestNoGPUs: a node without GPUs has no slice, not an empty one.
func TestNoGPUs(t *testing.T) {
	i := mustInventory(t, &gpu.Node{DriverVersion: "580.95.05"})
	if objects := i.ResourceSlices(testOptions); len(objects) != 0 || len(i.Devices()) != 0 {
		t.Errorf("slices %v", objects)
	}
}

func TestLongAndUnknownValues(t *testing.T) {
	node := &gpu.Node{GPUs: []gpu.GPU{{
		PCIAddress:   "0000:1b:00.0",
		ProductName:  strings.Repeat("x", 63) + "é",
		Architecture: "not \xff UTF-8",
	}}}
	devices := devicesOf(mustInventory(t, node).ResourceSlices(testOptions))
	a := devices[0].Attributes
	expect.Same(t, *a["productName"].StringValue, strings.Repeat("x", 63), "product name")
	expect.Same(t, *a["architecture"].StringValue, "not ? UTF-8", "architecture")
	for _, name := range []resourceapi.QualifiedName{"addressingMode", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"} {
		if _, ok := a[name]; ok {
			t.Errorf("%s is published although it is not known", name)
		}
	}
}
