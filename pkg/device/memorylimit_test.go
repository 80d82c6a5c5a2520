// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

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

// TestShareAttributes: who holds the limit depends on the driver, on the library and on what is shared. How well claims are
// isolated does not depend on the driver.
func TestShareAttributes(t *testing.T) {
	for _, test := range []struct {
		driver, library bool
		want            map[string]string // isolation and limit by the device's short name
	}{
		{false, false, map[string]string{"mps": "process server", "timeslice": "none none", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "none none"}},
		{false, true, map[string]string{"mps": "process server", "timeslice": "software client", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "software client"}},
		{true, false, map[string]string{"mps": "process driver", "timeslice": "none driver", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "none none"}},
		{true, true, map[string]string{"mps": "process driver", "timeslice": "software driver", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "software client"}},
	} {
		test.want["whole"], test.want["1g10gb-6"] = "hardware ", "hardware " // one claim has it alone
		node := loadNode(t, "h100-80-sxm")
		node.GPUs[0].MemoryLimits = test.driver
		for _, d := range devicesOf(inventoryOf(t, node, sharedTerms(test.library, 1)).ResourceSlices(testOptions)) {
			text := func(name resourceapi.QualifiedName) string { return *d.Attributes[name].StringValue }
			want, is := test.want[shortName(d.Name)]
			if got := text("isolation") + " " + text("memoryLimit"); is && got != want {
				t.Errorf("driver %t, library %t: %s is %q, want %q", test.driver, test.library, d.Name, got, want)
			}
			delete(test.want, shortName(d.Name))
			uuid, profile := node.GPUs[0].UUID, ""
			if strings.Contains(d.Name, "-mig-1g10gb-6") {
				uuid, profile = "", "1g.10gb"
			}
			if is && (text("uuid") != uuid || text("profile") != profile || text("parentUUID") != node.GPUs[0].UUID) {
				t.Errorf("%s is of %q, of %q, %q", d.Name, text("parentUUID"), text("uuid"), text("profile"))
			}
		}
		if len(test.want) > 0 {
			t.Errorf("driver %t, library %t: not published: %v", test.driver, test.library, test.want)
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
