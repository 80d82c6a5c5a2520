// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
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
	with := func(shares, memory, percent string) amounts {
		return amounts{"shares": shares, "memory": memory, "smPercent": percent, "multiprocessors": "0"}
	}
	overcommitted := offering(func(o *policy.Offer) {
		o.MPS = &policy.MPSOffer{Clients: 3, MemoryOvercommit: 2, ComputeOvercommit: 1.5}
	})
	tests := map[string]struct {
		class    string
		terms    Terms
		requests []amounts
		want     []amounts
		more     amounts // what does not fit any more
	}{
		"as the policy divides": {"mps", Terms{}, []amounts{nil, nil, nil, nil}, slices.Repeat([]amounts{with("1", "19721Mi", "25")}, 4), nil},
		"four times ten GiB": {"mps", Terms{}, slices.Repeat([]amounts{{"memory": "10Gi", "smPercent": "25"}}, 4),
			slices.Repeat([]amounts{with("1", "10Gi", "25")}, 4), nil},
		"rounded up":      {"mps", Terms{}, []amounts{{"memory": "1500000k", "smPercent": "100m"}}, []amounts{with("1", "1431Mi", "1")}, amounts{"memory": "80Gi"}},
		"at least a bit":  {"mps", Terms{}, []amounts{{"memory": "0", "smPercent": "0", "shares": "0"}}, []amounts{with("1", "1Mi", "1")}, amounts{"smPercent": "100"}},
		"several shares":  {"mps", Terms{}, []amounts{{"shares": "3"}, {"shares": "1"}}, []amounts{with("3", "19721Mi", "25"), with("1", "19721Mi", "25")}, nil},
		"memory runs out": {"mps", Terms{}, []amounts{{"memory": "40Gi"}, {"memory": "37Gi"}}, []amounts{with("1", "40Gi", "25"), with("1", "37Gi", "25")}, amounts{"memory": "200Mi"}},
		"percents run out": {"mps", Terms{}, []amounts{{"smPercent": "70"}, {"smPercent": "30"}},
			[]amounts{with("1", "19721Mi", "70"), with("1", "19721Mi", "30")}, amounts{"smPercent": "1"}},
		"more than there is of each": {"mps", overcommitted, []amounts{{"memory": "77Gi", "smPercent": "100"}, {"memory": "77Gi", "smPercent": "50"}},
			[]amounts{with("1", "77Gi", "100"), with("1", "77Gi", "50")}, amounts{"smPercent": "1", "memory": "2Gi"}},
		"but not for one claim":      {"mps", overcommitted, nil, nil, amounts{"memory": "80Gi"}},
		"nor above all":              {"mps", overcommitted, nil, nil, amounts{"smPercent": "101"}},
		"nor more shares than are":   {"mps", Terms{}, nil, nil, amounts{"shares": "5"}},
		"a capacity that nobody has": {"mps", Terms{}, nil, nil, amounts{"other": "1"}},
		"engines are nobody's":       {"mps", Terms{}, nil, nil, amounts{"decoders": "1"}},
		"multiprocessors are counted": {"mps", Terms{}, []amounts{{"multiprocessors": "100"}}, []amounts{withAmount(with("1", "19721Mi", "25"), "multiprocessors", "100")},
			amounts{"multiprocessors": "33"}},
		// Without limits a claim for a time slice counts for nothing but its share, unless it says how much memory it needs.
		"advisory": {"timeslice", Terms{}, []amounts{nil, {"memory": "40Gi"}, nil},
			[]amounts{with("1", "0", "0"), with("1", "40Gi", "0"), with("1", "0", "0")}, amounts{"memory": "40Gi"}},
		"advisory, and no part of the multiprocessors": {"timeslice", Terms{}, nil, nil, amounts{"smPercent": "25"}},
		"no more time slices than are":                 {"timeslice", Terms{}, make([]amounts, 4), slices.Repeat([]amounts{with("1", "0", "0")}, 4), nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, inventoryOf(t, loadNode(t, "h100-80-sxm"), tc.terms).ResourceSlices(testOptions))
			ids := map[string]bool{}
			for n, asked := range tc.requests {
				r, ok := s.allocateOne(consuming(request(tc.class, 1), asked))
				if !ok || r.Device != "gpu-0000-1b-00-0-"+tc.class || r.ShareID == nil || ids[string(*r.ShareID)] {
					t.Fatalf("claim %d: %v", n, r)
				}
				ids[string(*r.ShareID)] = true
				expect.Same(t, consumption(r), tc.want[n], fmt.Sprintf("claim %d consumes", n))
			}
			expect.Same(t, s.allocate(consuming(request(tc.class, 1), tc.more)), "", "one more claim")
		})
	}
}

func withAmount(m amounts, name resourceapi.QualifiedName, value string) amounts {
	m[name] = value
	return m
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
	// One claim gets two shares of one device by two requests.
	results, err := s.attemptClaims([]resourceapi.DeviceRequest{mps, mps})
	if err != nil || len(results) != 1 || len(results[0].Devices.Results) != 2 ||
		results[0].Devices.Results[0].Device != results[0].Devices.Results[1].Device ||
		*results[0].Devices.Results[0].ShareID == *results[0].Devices.Results[1].ShareID {
		t.Errorf("two requests: %v, %v", results, err)
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
