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

	"github.com/partage-dev/partage/pkg/policy"
)

type amounts = map[resourceapi.QualifiedName]string

// sharedH100 is an H100 on which everything can be had in every way.
func sharedH100(t *testing.T) *Inventory {
	t.Helper()
	return inventoryOf(t, loadNode(t, "h100-80-sxm"), sharing(
		policy.PartitionShares{Profiles: []string{"1g.10gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(3)}))
}

// consumption of a result as text.
func consumption(r resourceapi.DeviceRequestAllocationResult) amounts {
	out := amounts{}
	for name, q := range r.ConsumedCapacity {
		out[name] = q.String()
	}
	return out
}

// TestAllocatorShares: as many claims as the policy says get a share, each one of
// its own, and each consumes what it asks for.
func TestAllocatorShares(t *testing.T) {
	const mps = "gpu-0000-1b-00-0-mps"
	with := func(shares, memory, percent string) amounts {
		return amounts{"shares": shares, "memory": memory, "smPercent": percent, "multiprocessors": "0"}
	}
	overcommitted := offering(func(o *policy.Offer) {
		o.MPS = &policy.MPSOffer{Clients: 3, MemoryOvercommit: 2, ComputeOvercommit: 1.5}
	})
	tests := map[string]struct {
		terms    Terms
		requests []amounts
		want     []amounts
		more     amounts // what does not fit any more
	}{
		"as the policy divides": {Terms{}, []amounts{nil, nil, nil, nil}, slices.Repeat([]amounts{with("1", "19721Mi", "25")}, 4), nil},
		"four times ten GiB": {Terms{}, slices.Repeat([]amounts{{"memory": "10Gi", "smPercent": "25"}}, 4),
			slices.Repeat([]amounts{with("1", "10Gi", "25")}, 4), nil},
		"rounded up":      {Terms{}, []amounts{{"memory": "1500000k", "smPercent": "100m"}}, []amounts{with("1", "1431Mi", "1")}, amounts{"memory": "80Gi"}},
		"at least a bit":  {Terms{}, []amounts{{"memory": "0", "smPercent": "0", "shares": "0"}}, []amounts{with("1", "1Mi", "1")}, amounts{"smPercent": "100"}},
		"several shares":  {Terms{}, []amounts{{"shares": "3"}, {"shares": "1"}}, []amounts{with("3", "19721Mi", "25"), with("1", "19721Mi", "25")}, nil},
		"memory runs out": {Terms{}, []amounts{{"memory": "40Gi"}, {"memory": "37Gi"}}, []amounts{with("1", "40Gi", "25"), with("1", "37Gi", "25")}, amounts{"memory": "200Mi"}},
		"percents run out": {Terms{}, []amounts{{"smPercent": "70"}, {"smPercent": "30"}},
			[]amounts{with("1", "19721Mi", "70"), with("1", "19721Mi", "30")}, amounts{"smPercent": "1"}},
		"more than there is of each": {overcommitted, []amounts{{"memory": "77Gi", "smPercent": "100"}, {"memory": "77Gi", "smPercent": "50"}},
			[]amounts{with("1", "77Gi", "100"), with("1", "77Gi", "50")}, amounts{"smPercent": "1", "memory": "2Gi"}},
		"but not for one claim":      {overcommitted, nil, nil, amounts{"memory": "80Gi"}},
		"nor above all":              {overcommitted, nil, nil, amounts{"smPercent": "101"}},
		"nor more shares than are":   {Terms{}, nil, nil, amounts{"shares": "5"}},
		"a capacity that nobody has": {Terms{}, nil, nil, amounts{"other": "1"}},
		"engines are nobody's":       {Terms{}, nil, nil, amounts{"decoders": "1"}},
		"multiprocessors are counted": {Terms{}, []amounts{{"multiprocessors": "100"}}, []amounts{withAmount(with("1", "19721Mi", "25"), "multiprocessors", "100")},
			amounts{"multiprocessors": "33"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, inventoryOf(t, loadNode(t, "h100-80-sxm"), tc.terms).ResourceSlices(testOptions))
			ids := map[string]bool{}
			for n, asked := range tc.requests {
				r, ok := s.allocateOne(consuming(request("mps", 1), asked))
				if !ok || r.Device != mps || r.ShareID == nil || ids[string(*r.ShareID)] {
					t.Fatalf("claim %d: %v", n, r)
				}
				ids[string(*r.ShareID)] = true
				if diff := cmp.Diff(tc.want[n], consumption(r)); diff != "" {
					t.Errorf("claim %d consumes (-want +got):\n%s", n, diff)
				}
			}
			if got := s.allocate(consuming(request("mps", 1), tc.more)); got != "" {
				t.Errorf("one more claim got %s", got)
			}
		})
	}
}

// TestAllocatorPercentOfExclusive: a request that says how many of the multiprocessors it needs can
// be for a whole GPU in place of a share, and gets no partition.
func TestAllocatorPercentOfExclusive(t *testing.T) {
	const whole = "gpu-0000-1b-00-0"
	for class, want := range map[string]string{"gpu": whole, "mig": "", "any": whole} {
		s := newScheduler(t, mustInventory(t, loadNode(t, "h100-80-sxm")).ResourceSlices(testOptions))
		if got := s.allocate(consuming(request(class, 1), amounts{"memory": "10Gi", "smPercent": "25"})); got != want {
			t.Errorf("class %s: got %q, want %q", class, got, want)
		}
	}
}

func withAmount(m amounts, name resourceapi.QualifiedName, value string) amounts {
	m[name] = value
	return m
}

// TestAllocatorAdvisory: without limits a claim for a time slice counts for
// nothing but its share, unless it says how much memory it needs.
func TestAllocatorAdvisory(t *testing.T) {
	s := newScheduler(t, mustInventory(t, loadNode(t, "t4")).ResourceSlices(testOptions))
	want := amounts{
		"shares": "1", "memory": "0", "smPercent": "0",
		"multiprocessors": "0",
	}
	if got := s.allocate(consuming(request("timeslice", 1), amounts{"smPercent": "25"})); got != "" {
		t.Errorf("%s promises a part of the multiprocessors", got)
	}
	for _, asked := range []string{"", "8Gi", ""} {
		request := request("timeslice", 1)
		if want["memory"] = "0"; asked != "" {
			want["memory"] = asked
			request = consuming(request, amounts{"memory": asked})
		}
		r, _ := s.allocateOne(request)
		if diff := cmp.Diff(want, consumption(r)); diff != "" || r.Device != "gpu-0000-1b-00-0-timeslice" {
			t.Errorf("got %s, which consumes (-want +got):\n%s", r.Device, diff)
		}
	}
	if got := s.allocate(consuming(request("timeslice", 1), amounts{"memory": "8Gi"})); got != "" {
		t.Errorf("allocated %s beyond the memory", got)
	}
	if got := s.allocate(request("timeslice", 1)); got == "" {
		t.Error("no fourth share")
	}
	if got := s.allocate(request("timeslice", 1)); got != "" {
		t.Errorf("a fifth share: %s", got)
	}
}

// TestAllocatorExclusion: what one claim has of a GPU and what another could have
// are compared pair by pair. Disjoint partitions, and shares of those, go together,
// and so do shares of one device; all else is refused.
func TestAllocatorExclusion(t *testing.T) {
	for _, i := range []*Inventory{sharedH100(t), mustInventory(t, loadNode(t, "t4")), mustInventory(t, loadNode(t, "a100-80"))} {
		s := newScheduler(t, i.ResourceSlices(testOptions))
		pairs := 0
		for _, held := range i.Devices() {
			for _, wanted := range i.Devices() {
				want := wanted.Share != nil && held.Name == wanted.Name
				if held.Partition != nil && wanted.Partition != nil && !held.Partition.Placement.Overlaps(wanted.Partition.Placement) {
					// The only OFA engine is in the +me profile.
					ofa := held.Partition.Profile.Resources.OFAEngines + wanted.Partition.Profile.Resources.OFAEngines
					want = ofa < 2
				}
				pairs += oneIf(want)
				// A share that is held is full, so that there is one device to choose from.
				scheduler := s.only(held.Name, wanted.Name).holding(held.Name)
				if held.Share != nil && held.Name != wanted.Name {
					for range held.Share.Clients - 1 {
						scheduler = scheduler.holding(held.Name)
					}
				}
				got := scheduler.allocate(request("any", 1))
				if (got == wanted.Name) != want || got != "" && got != wanted.Name {
					t.Errorf("%s beside %s: allocated %q, want %t", wanted.Name, held.Name, got, want)
				}
			}
		}
		if pairs == 0 {
			t.Error("nothing goes together")
		}
	}
}

// TestAllocatorRoles: a GPU changes its role from claim to claim. The first share
// takes all of what is shared, the last gives it back.
func TestAllocatorRoles(t *testing.T) {
	s := newScheduler(t, sharedH100(t).ResourceSlices(testOptions))
	whole := `device.attributes["gpu.nvidia.com"].profile == ""`
	for round := range 2 {
		for _, class := range []string{"mps", "timeslice"} {
			var held []resourceapi.DeviceRequestAllocationResult
			for n := range 4 {
				r, ok := s.allocateOne(request(class, 1, whole))
				if !ok {
					t.Fatalf("round %d: no %s share number %d", round, class, n+1)
				}
				held = append(held, r)
			}
			if r, ok := s.allocateOne(request(class, 1)); ok {
				t.Errorf("round %d: a fifth %s share: %s", round, class, r.Device)
			}
			for _, r := range held {
				for _, other := range []string{"gpu", "mig", "mps", "timeslice"} {
					if got := s.holding().allocate(request(other, 1, whole)); other != class && got != "" {
						t.Errorf("round %d: %s was allocated beside %s", round, got, r.Device)
					}
				}
				s.release(r)
			}
		}
		r, ok := s.allocateOne(request("gpu", 1))
		if !ok {
			t.Fatalf("round %d: the last share did not give the GPU back", round)
		}
		s.release(r)
	}
}

// TestAllocatorOneAttempt: the claims of one pod, or of a gang, get shares of one
// device and not a device beside its shares.
func TestAllocatorOneAttempt(t *testing.T) {
	s := newScheduler(t, mustInventory(t, loadNode(t, "t4")).ResourceSlices(testOptions))
	mps := request("mps", 1)
	got, err := s.try(mps, mps, mps, mps)
	if err != nil || len(got) != 4 {
		t.Fatalf("%v, %v", got, err)
	}
	for _, requests := range [][]resourceapi.DeviceRequest{
		{mps, mps, mps, mps, mps}, {request("gpu", 1), mps}, {mps, request("gpu", 1)}, {mps, request("timeslice", 1)}, {request("timeslice", 1), mps},
	} {
		if got, err := s.try(requests...); err != nil || got != nil {
			t.Errorf("%v, %v", got, err)
		}
	}
	// One claim gets two shares of one device by two requests. One request for two
	// gets two devices.
	results, err := s.attemptClaims([]resourceapi.DeviceRequest{mps, mps})
	if err != nil || len(results) != 1 || len(results[0].Devices.Results) != 2 ||
		results[0].Devices.Results[0].Device != results[0].Devices.Results[1].Device ||
		*results[0].Devices.Results[0].ShareID == *results[0].Devices.Results[1].ShareID {
		t.Errorf("two requests: %v, %v", results, err)
	}
	if got, err := s.try(request("mps", 2)); err != nil || got != nil {
		t.Errorf("two of one: %v, %v", got, err)
	}
	two := newScheduler(t, mustInventory(t, replicate(loadNode(t, "t4"), 2)).ResourceSlices(testOptions))
	got, err = two.try(request("mps", 2))
	if diff := cmp.Diff([][]string{{"gpu-0000-1b-00-0-mps", "gpu-0000-28-00-0-mps"}}, got); diff != "" || err != nil {
		t.Errorf("two of two: %v (-want +got):\n%s", err, diff)
	}
}

// TestAllocatorTwentyEight: seven partitions with four shares each.
func TestAllocatorTwentyEight(t *testing.T) {
	node := loadNode(t, "a100-80")
	node.GPUs[0].MIG.Enabled = true
	i := inventoryOf(t, node, sharing(policy.PartitionShares{Profiles: []string{"1g.10gb"}, TimeSlice: timeSliceOf(4)}))
	s := newScheduler(t, i.ResourceSlices(testOptions))
	// One partition after the other is filled up, in the order of partitions.
	for n := range 28 {
		want := fmt.Sprintf("1g10gb-%d-timeslice", []int{6, 4, 5, 2, 3, 0, 1}[n/4])
		if got := shortName(s.allocate(request("timeslice", 1))); got != want {
			t.Errorf("share %d is of %s, want %s", n+1, got, want)
		}
	}
	for _, class := range []string{"any", "mig", "timeslice"} {
		if got := s.allocate(request(class, 1)); got != "" {
			t.Errorf("allocated %s of a full GPU", got)
		}
	}
}

// TestAllocatorShareOrder: who does not ask for a share gets what is exclusive, and
// who asks for any gets the smallest.
func TestAllocatorShareOrder(t *testing.T) {
	i := sharedH100(t)
	partitions, whole := 0, 0
	s := newScheduler(t, i.ResourceSlices(testOptions))
	for _, d := range i.Devices() {
		if d.Exclusive() {
			partitions += oneIf(d.Partition != nil)
			whole += oneIf(d.Partition == nil)
		}
	}
	for n, d := range i.Devices() {
		if d.Exclusive() != (n < partitions+whole) {
			t.Errorf("%s is number %d", d.Name, n)
		}
	}
	tests := map[string]struct {
		requests []resourceapi.DeviceRequest
		want     string
	}{
		"anything":                     {[]resourceapi.DeviceRequest{request("any", 1)}, "1g10gb-6"},
		"anything that is a whole GPU": {[]resourceapi.DeviceRequest{request("any", 1, `device.attributes["gpu.nvidia.com"].profile == ""`)}, "whole"},
		"MPS":                          {[]resourceapi.DeviceRequest{request("mps", 1), request("mps", 1), request("mps", 1)}, "1g10gb-6-mps 1g10gb-6-mps 1g10gb-4-mps"},
		"MPS of the whole GPU": {[]resourceapi.DeviceRequest{request("mps", 1, `device.attributes["gpu.nvidia.com"].profile == ""`),
			request("mps", 1)}, "mps mps"},
		"as much as only the whole GPU has": {[]resourceapi.DeviceRequest{consuming(request("mps", 1), amounts{"memory": "20Gi"})}, "mps"},
		"both kinds":                        {[]resourceapi.DeviceRequest{request("timeslice", 1), request("mps", 1)}, "1g10gb-6-timeslice 1g10gb-4-mps"},
		"shares beside a partition":         {[]resourceapi.DeviceRequest{request("mig", 1), request("mps", 1), request("timeslice", 1)}, "1g10gb-6 1g10gb-4-mps 1g10gb-5-timeslice"},
		"faults that stay away": {[]resourceapi.DeviceRequest{request("any", 1,
			`device.attributes["gpu.nvidia.com"].isolation == "hardware"`)}, "1g10gb-6"},
		"any share": {[]resourceapi.DeviceRequest{request("any", 1, "device.allowMultipleAllocations")}, "1g10gb-6-mps"},
		"none":      {[]resourceapi.DeviceRequest{request("any", 1, "!device.allowMultipleAllocations")}, "1g10gb-6"},
	}
	for name, tc := range tests {
		got, err := s.try(tc.requests...)
		var short []string
		for _, claim := range got {
			short = append(short, shortName(claim[0]))
		}
		if text := strings.Join(short, " "); err != nil || text != tc.want {
			t.Errorf("%s: allocated %q, %v, want %q", name, text, err, tc.want)
		}
	}
}

// TestAllocatorSharedAlready: a request that does not say which type gets a share of
// a GPU that is shared already before another GPU. Classes ask for the type.
func TestAllocatorSharedAlready(t *testing.T) {
	s := newScheduler(t, mustInventory(t, replicate(loadNode(t, "t4"), 2)).ResourceSlices(testOptions)).holding("gpu-0000-1b-00-0-mps")
	for class, want := range map[string]string{"any": "gpu-0000-1b-00-0-mps", "gpu": "gpu-0000-28-00-0", "timeslice": "gpu-0000-28-00-0-timeslice"} {
		if got := s.holding().allocate(request(class, 1)); got != want {
			t.Errorf("%s: allocated %s, want %s", class, got, want)
		}
	}
}

// TestAllocatorShareStatus: shares are out for the same reasons as what is shared.
func TestAllocatorShareStatus(t *testing.T) {
	i := sharedH100(t)
	tests := map[string]struct {
		status Status
		// mps and timeslice are what is left to allocate.
		mps, timeSlice string
	}{
		"all is well":        {Status{}, "1g10gb-6-mps", "1g10gb-6-timeslice"},
		"somebody's 1g":      {Status{Static: []Static{static(firstGPU, profile1g, at(6, 1), "MIG-1")}}, "1g10gb-4-mps", "1g10gb-4-timeslice"},
		"somebody's 3g":      {Status{Static: []Static{static(firstGPU, profile3g, at(4, 4), "MIG-1")}}, "1g10gb-2-mps", "1g10gb-2-timeslice"},
		"a release":          {Status{Conditions: []Condition{inPlace(firstGPU, at(4, 4), ReleasePending)}}, "1g10gb-2-mps", "1g10gb-2-timeslice"},
		"a server that died": {Status{Conditions: []Condition{inPlace(firstGPU, at(6, 1), MPSUnhealthy)}}, "1g10gb-4-mps", "1g10gb-4-timeslice"},
		"the GPU's server":   {Status{Conditions: []Condition{onGPU(firstGPU, MPSUnhealthy)}}, "", ""},
		"a GPU that is lost": {Status{Conditions: []Condition{onGPU(firstGPU, Lost)}}, "", ""},
	}
	for name, tc := range tests {
		for class, want := range map[string]string{"mps": tc.mps, "timeslice": tc.timeSlice} {
			with := i.With(tc.status)
			checkAPI(t, with.ResourceSlices(testOptions))
			s := newScheduler(t, with.ResourceSlices(testOptions))
			if got := s.allocate(request(class, 1)); got != "" && shortName(got) != want || got == "" && want != "" {
				t.Errorf("%s: allocated %q for %s, want %q", name, got, class, want)
			}
		}
	}
}

// TestShareShortage: a share needs the engines that its partition needs.
func TestShareShortage(t *testing.T) {
	node := loadNode(t, "h100-80-sxm")
	i := inventoryOf(t, node, sharing(policy.PartitionShares{Profiles: []string{"1g.10gb+me"}, MPS: mpsOf(2)}))
	got := tainted(i.With(Status{Static: []Static{static(firstGPU, profile1gMe, at(6, 1), "MIG-1")}}), testOptions)
	for n := range 7 {
		if name := fmt.Sprintf("1g10gb-me-%d-mps", n); got[name] != string(Occupied) {
			t.Errorf("%s is tainted with %q", name, got[name])
		}
	}
}
