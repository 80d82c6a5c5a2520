// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/policy"
)

// sharedTerms share the GPU and its smallest partitions in both ways.
func sharedTerms(limited bool, overcommit float64) Terms {
	terms := sharing(policy.PartitionShares{Profiles: []string{"1g.10gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)})
	terms.Limited = limited
	offer := terms.Policy.Default
	offer.TimeSlice = &policy.TimeSliceOffer{Clients: 4, MemoryOvercommit: overcommit}
	offer.MPS = &policy.MPSOffer{Clients: 4, MemoryOvercommit: overcommit}
	terms.Policy = &policy.Policy{Default: offer}
	return terms
}

// TestMemoryLimitAttribute: who holds the limit depends on the driver, on the library and on what is shared. How well claims are
// isolated does not depend on the driver.
func TestMemoryLimitAttribute(t *testing.T) {
	isolation := map[string]string{}
	for _, test := range []struct {
		driver, library bool
		want            map[string]string // by the device's short name
	}{
		{false, false, map[string]string{"mps": "server", "timeslice": "none", "1g10gb-6-mps": "server", "1g10gb-6-timeslice": "none"}},
		{false, true, map[string]string{"mps": "server", "timeslice": "client", "1g10gb-6-mps": "server", "1g10gb-6-timeslice": "client"}},
		{true, false, map[string]string{"mps": "driver", "timeslice": "driver", "1g10gb-6-mps": "server", "1g10gb-6-timeslice": "none"}},
		{true, true, map[string]string{"mps": "driver", "timeslice": "driver", "1g10gb-6-mps": "server", "1g10gb-6-timeslice": "client"}},
	} {
		node := loadNode(t, "h100-80-sxm")
		node.GPUs[0].MemoryLimits = test.driver
		found := map[string]string{}
		for _, d := range devicesOf(inventoryOf(t, node, sharedTerms(test.library, 1)).ResourceSlices(testOptions)) {
			name, limit := shortName(d.Name), *d.Attributes["memoryLimit"].StringValue
			if _, is := test.want[name]; is {
				found[name] = limit
			} else if !slices.Contains([]string{"mps", "timeslice"}, *d.Attributes["type"].StringValue) && limit != "" {
				t.Errorf("%s, which one claim has alone, has the limit %q", d.Name, limit)
			}
			key, is := fmt.Sprint(d.Name, test.library), *d.Attributes["isolation"].StringValue
			if before, seen := isolation[key]; seen && before != is {
				t.Errorf("driver %t: the isolation of %s is %s, was %s", test.driver, d.Name, is, before)
			}
			isolation[key] = is
		}
		if !maps.Equal(found, test.want) {
			t.Errorf("driver %t, library %t: %v, want %v", test.driver, test.library, found, test.want)
		}
	}
}

// TestHeldShares: where the driver holds time-slice shares, a claim that asks for no memory has an equal part of it. What is
// guaranteed to all of them fits, even where the policy overcommits.
func TestHeldShares(t *testing.T) {
	node := loadNode(t, "t4")
	node.GPUs[0].MemoryLimits = true
	for _, overcommit := range []float64{1, 1.15, 2, 7} {
		for _, d := range inventoryOf(t, node, sharedTerms(false, overcommit)).Devices() {
			s := d.Share
			if s == nil {
				continue
			}
			if !s.Held || s.DefaultMemoryBytes == 0 || s.DefaultMemoryBytes > s.MaxMemoryBytes || d.Kind == TimeSlice && s.Percent != 0 {
				t.Errorf("%s: %+v", d.Name, s)
			}
			soft := s.Guaranteed(s.DefaultMemoryBytes)
			if overcommit == 1 && soft != s.DefaultMemoryBytes || soft > s.DefaultMemoryBytes || soft < mib || soft%mib != 0 {
				t.Errorf("%s, overcommitted by %v: %d of %d bytes are guaranteed", d.Name, overcommit, soft, s.DefaultMemoryBytes)
			}
			// As many claims as the scheduler accounts memory for.
			if claims := s.MemoryBytes / s.DefaultMemoryBytes; claims*soft > s.MaxMemoryBytes {
				t.Errorf("%s, overcommitted by %v: %d claims with %d bytes each, of %d", d.Name, overcommit, claims, soft, s.MaxMemoryBytes)
			}
			if least := s.Guaranteed(1); least != mib {
				t.Errorf("%d bytes at least", least)
			}
		}
	}
}
