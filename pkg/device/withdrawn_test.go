// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// keeping adds names on the first GPU, as shortName has them.
func keeping(terms Terms, short ...string) Terms {
	terms.Keep = map[string]bool{}
	for _, name := range short {
		full := "gpu-0000-1b-00-0-" + name
		if strings.Contains("0123456789", name[:1]) {
			full = "gpu-0000-1b-00-0-mig-" + name
		}
		terms.Keep[strings.TrimSuffix(full, "-whole")] = true
	}
	return terms
}

// TestNothingOffered: of a GPU that the policy leaves alone what claims have is published.
func TestNothingOffered(t *testing.T) {
	i := inventoryOf(t, loadNode(t, "h100-80-sxm"), keeping(Terms{Policy: &policy.Policy{}}, "3g40gb-4"))
	if diff := cmp.Diff([]string{"3g40gb-4"}, shortNames(i.Devices())); diff != "" || len(i.With(Status{}).Withdrawn()) != 1 {
		t.Errorf("withdrawn %v, in use (-want +got):\n%s", i.Withdrawn(), diff)
	}
}

// TestWithdrawn: what a claim may have stays in its place although the policy does
// not offer it, like before, and cannot be allocated.
func TestWithdrawn(t *testing.T) {
	offered := []policy.PartitionShares{{Profiles: []string{"1g.10gb"}, MPS: mpsOf(2)}}
	terms := keeping(offering(func(o *policy.Offer) {
		*o = policy.Offer{MPS: mpsOf(3), Partition: &policy.PartitionOffer{Profiles: []string{"3g.40gb"}, Shares: offered}}
	}), "whole", "timeslice", "mps", "7g80gb-0", "3g40gb-4", "4g40gb-0-mps", "1g10gb-6-mps", "1g10gb-6-timeslice", "1g99gb-0", "1g10gb-7", "4g40gb-0-static")
	terms.Keep["gpu-0000-99-00-0"] = true
	i := inventoryOf(t, loadNode(t, "h100-80-sxm"), terms)
	want := []string{
		"3g40gb-4", "3g40gb-0", "7g80gb-0", "whole",
		"1g10gb-6-mps", "1g10gb-6-timeslice", "1g10gb-4-mps", "1g10gb-5-mps", "1g10gb-2-mps", "1g10gb-3-mps", "1g10gb-0-mps", "1g10gb-1-mps",
		"4g40gb-0-mps", "mps", "timeslice",
	}
	expect.Same(t, shortNames(i.Devices()), want, "devices")
	withdrawn := []string{"7g80gb-0", "whole", "1g10gb-6-timeslice", "4g40gb-0-mps", "timeslice"}
	taints := map[string]string{}
	for _, name := range withdrawn {
		taints[name] = "withdrawn"
	}
	for what, i := range map[string]*Inventory{"new": i, "with": i.With(Status{})} {
		var got []string
		for _, name := range i.Withdrawn() {
			got = append(got, shortName(name))
		}
		expect.Same(t, got, withdrawn, what+": withdrawn")
		expect.Same(t, tainted(i, testOptions), taints, what+": taints")
	}
	// What is the case comes on top.
	place := at(0, 2)
	for _, d := range i.Devices() {
		if d.Partition == nil || d.Partition.Placement.Overlaps(place) {
			name := shortName(d.Name)
			taints[name] = strings.TrimSpace("mps-unhealthy " + taints[name])
		}
	}
	expect.Same(t, tainted(i.With(Status{Conditions: []Condition{inPlace(firstGPU, place, MPSUnhealthy)}}), testOptions), taints, "taints")
	// Numbers are the offer's where there is one, or else the built-in ones.
	for short, want := range map[string]int{"mps": 3, "timeslice": 4, "mig-1g10gb-6-mps": 2, "mig-1g10gb-6-timeslice": 4, "mig-4g40gb-0-mps": 4} {
		if d, _ := i.Lookup("gpu-0000-1b-00-0-" + short); d.Share == nil || d.Share.Clients != want {
			t.Errorf("%s: share %+v, want one for %d clients", short, d.Share, want)
		}
	}
	s := newScheduler(t, i.ResourceSlices(testOptions))
	for _, class := range []string{"gpu", "timeslice"} {
		expect.Same(t, s.allocate(request(class, 1)), "", "of what is withdrawn")
	}
	expect.Same(t, s.holding("gpu-0000-1b-00-0-timeslice").allocate(request("any", 1)), "", "beside a share that is withdrawn")
}

// TestNothingIsWithdrawn when the policy offers it.
func TestNothingIsWithdrawn(t *testing.T) {
	for _, b := range testBoards(t) {
		plain := mustInventory(t, b.node)
		terms := keeping(everything)
		for _, d := range plain.Devices() {
			terms.Keep[d.Name] = true
		}
		i := inventoryOf(t, b.node, terms)
		if diff := cmp.Diff(plain.ResourceSlices(testOptions), i.ResourceSlices(testOptions)); diff != "" || len(i.Withdrawn()) != 0 {
			t.Errorf("%s: withdrawn %v (-want +got):\n%s", b.name, i.Withdrawn(), diff)
		}
	}
}

// TestWhatCannotBeIsNotKept: MIG on or off is a fact, and MPS needs Volta.
func TestWhatCannotBeIsNotKept(t *testing.T) {
	for board, keep := range map[string][]string{
		"a100-80-mig": {"whole", "mps", "timeslice"},
		"a100-80":     {"1g10gb-0", "1g10gb-0-mps", "7g80gb-0-timeslice"},
		"t4":          {"1g10gb-0", "1g10gb-0-mps"},
	} {
		node := loadNode(t, board)
		expect.Same(t, inventoryOf(t, node, keeping(everything, keep...)).Devices(), mustInventory(t, node).Devices(), board+": devices")
	}
	old := loadNode(t, "t4")
	old.GPUs[0].ComputeCapability.Major = 6
	if i := inventoryOf(t, old, keeping(Terms{}, "mps")); len(i.Withdrawn()) != 0 {
		t.Errorf("withdrawn %v", i.Withdrawn())
	}
}

// TestImpossibleOfferIsWithdrawn: a policy that wants what cannot be takes nothing
// away from claims.
func TestImpossibleOfferIsWithdrawn(t *testing.T) {
	impossible := func(o *policy.Offer) { o.MPS.ReservedMemoryBytes = 1 << 50 }
	for _, kept := range []bool{false, true} {
		terms := offering(impossible)
		if kept {
			terms = keeping(terms, "mps")
		}
		i, problems := problemsOf(t, loadNode(t, "t4"), terms)
		wantProblems(t, problems, "none are published")
		d, found := i.Lookup("gpu-0000-1b-00-0-mps")
		if found != kept || found && d.Share.Clients != policy.DefaultClients || slices.Contains(i.Withdrawn(), d.Name) != kept {
			t.Errorf("kept %t: found %t, withdrawn %v, share %+v", kept, found, i.Withdrawn(), d.Share)
		}
	}
}

// TestStaticUnderPolicy: a static partition is offered where one of this driver's
// would be, and stays when a claim has it.
func TestStaticUnderPolicy(t *testing.T) {
	only3g := offering(func(o *policy.Offer) {
		o.Partition = &policy.PartitionOffer{Profiles: []string{"3g.40gb"}, Shares: []policy.PartitionShares{{Profiles: []string{"1g.10gb"}, MPS: mpsOf(2)}}}
	})
	status := Status{Static: []Static{static(firstGPU, profile3g, at(4, 4), "MIG-1"), static(firstGPU, profile1g, at(0, 1), "MIG-2")}}
	tests := map[string]struct {
		terms             Terms
		static, withdrawn []string
	}{
		"all profiles":          {everything, []string{"1g10gb-0-static", "3g40gb-4-static"}, nil},
		"one, the other shared": {only3g, []string{"3g40gb-4-static"}, nil},
		"the other is kept":     {keeping(only3g, "1g10gb-0-static", "3g40gb-4-static"), []string{"1g10gb-0-static", "3g40gb-4-static"}, []string{"1g10gb-0-static"}},
		// The device that could be made in the place does not bring the static one.
		"in the place of one that is kept": {keeping(only3g, "1g10gb-0"), []string{"3g40gb-4-static"}, []string{"1g10gb-0"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			i := inventoryOf(t, loadNode(t, "h100-80-sxm"), tc.terms).With(status)
			checkAPI(t, i.ResourceSlices(testOptions))
			var got, withdrawn []string
			for _, d := range i.Devices() {
				if d.Static != nil {
					got = append(got, shortName(d.Name))
					if !d.Exclusive() || d.Kind != Partition {
						t.Errorf("%s is shared", d.Name)
					}
				}
			}
			for _, name := range i.Withdrawn() {
				withdrawn = append(withdrawn, shortName(name))
			}
			if !slices.Equal(got, tc.static) || !slices.Equal(withdrawn, tc.withdrawn) {
				t.Errorf("static devices %v, withdrawn %v, want %v and %v", got, withdrawn, tc.static, tc.withdrawn)
			}
			// Whatever is published, both places are taken.
			for name, reasons := range tainted(i, testOptions) {
				if slices.Contains(tc.withdrawn, name) != strings.Contains(reasons, "withdrawn") {
					t.Errorf("%s is tainted with %q", name, reasons)
				}
			}
			for _, d := range i.Devices() {
				occupied := strings.Contains(tainted(i, testOptions)[shortName(d.Name)], "occupied")
				overlaps := d.Partition == nil || d.Partition.Placement.Overlaps(at(4, 4)) || d.Partition.Placement.Overlaps(at(0, 1))
				if occupied != (overlaps && d.Static == nil) {
					t.Errorf("%s: occupied is %t", d.Name, occupied)
				}
			}
		})
	}
}

// TestRoomForWithdrawn: what claims may have takes no room from what the policy
// offers, and does not go for lack of room either.
func TestRoomForWithdrawn(t *testing.T) {
	sixes := policy.PartitionShares{Profiles: []string{"1g.10gb", "1g.10gb+me"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)}
	before, problems := problemsOf(t, loadNode(t, "h100-80-sxm"), sharing(sixes))
	wantProblems(t, problems, "time-slice shares of profile 1g.10gb+me are left out", "MPS shares of profile 1g.10gb+me are left out")
	keep := map[string]bool{}
	for _, d := range before.Devices() {
		keep[d.Name] = true
	}
	// More than all candidates of a slice.
	crowd := maps.Clone(keep)
	for _, s := range []string{"mps", "timeslice"} {
		for n := range 7 {
			crowd[fmt.Sprintf("gpu-0000-1b-00-0-mig-1g10gb-me-%d-%s", n, s)] = true
		}
	}
	fours := policy.PartitionShares{Profiles: []string{"1g.20gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)}
	for name, tc := range map[string]struct {
		keep              map[string]bool
		withdrawn, slices int
	}{"nothing": {nil, 0, 1}, "what was offered": {keep, 14, 2}, "a crowd": {crowd, 28, 2}} {
		t.Run(name, func(t *testing.T) {
			terms := sharing(fours)
			fresh := inventoryOf(t, loadNode(t, "h100-80-sxm"), terms)
			terms.Keep = tc.keep
			i := inventoryOf(t, loadNode(t, "h100-80-sxm"), terms).With(Status{Conditions: []Condition{onGPU(firstGPU, Lost)}})
			expect.Same(t, len(i.Withdrawn()), tc.withdrawn, "withdrawn")
			for name := range tc.keep {
				if _, ok := i.Lookup(name); !ok {
					t.Errorf("%s is gone", name)
				}
			}
			offered := slices.DeleteFunc(i.Devices(), func(d Device) bool { return slices.Contains(i.Withdrawn(), d.Name) })
			expect.Same(t, names(offered), names(fresh.Devices()), "offered")
			published := i.ResourceSlices(testOptions)
			checkAPI(t, published)
			expect.Same(t, len(published), 1+tc.slices, "slices")
			for _, d := range devicesOf(published) {
				if len(d.Taints) == 0 {
					t.Errorf("%s is not tainted", d.Name)
				}
			}
			// The slices of other GPUs stay where they are.
			two := must.Get(NewInventory(replicate(loadNode(t, "h100-80-sxm"), 2), terms))(t)
			if second := two.ResourceSlices(testOptions)[2].Spec.Devices[0]; !IsOf(secondGPU, second.Name) {
				t.Errorf("the third slice begins with %s", second.Name)
			}
		})
	}
}

func wantProblems(t *testing.T, problems []error, want ...string) {
	t.Helper()
	slices.Sort(want)
	if len(problems) != len(want) {
		t.Fatalf("problems %v, want %q", problems, want)
	}
	for _, w := range want {
		if !slices.ContainsFunc(problems, func(err error) bool { return strings.Contains(err.Error(), w) }) {
			t.Errorf("problems %v, want %q", problems, w)
		}
	}
}
