// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// TestProfileOfWholeGPUs is why devices without a profile have an empty one, while
// NVIDIA's driver publishes none for whole GPUs: what that changes for selectors of both
// kinds, those that read the attribute and those that ask whether it is there. An error is
// the end of the pod's scheduling attempt.
func TestProfileOfWholeGPUs(t *testing.T) {
	const (
		attributes = `device.attributes["gpu.nvidia.com"]`
		whole      = "gpu-0000-01-00-0"
		partition  = "gpu-0000-03-00-0-mig-1g5gb-6"
		fails      = "an error"
	)
	tests := map[string]struct {
		class, selector string
		empty, absent   string // what is allocated, or fails
	}{
		// What is written for partitions is the same in their class.
		"named":               {"mig", attributes + `.profile == "1g.5gb"`, partition, partition},
		"there, and named":    {"mig", `"profile" in ` + attributes + ` && ` + attributes + `.profile == "1g.5gb"`, partition, partition},
		"there":               {"mig", `"profile" in ` + attributes, partition, partition},
		"optional, and so on": {"mig", attributes + `.?profile.orValue("") == "1g.5gb"`, partition, partition},

		// Where whole GPUs are candidates, too, reading it needs a guard if it may be absent.
		"named, any device":            {"any", attributes + `.profile == "1g.5gb"`, partition, fails},
		"not empty, any device":        {"any", attributes + `.profile != ""`, partition, fails},
		"there, and named, any device": {"any", `"profile" in ` + attributes + ` && ` + attributes + `.profile == "1g.5gb"`, partition, partition},
		"optional, any device":         {"any", attributes + `.?profile.orValue("") == "1g.5gb"`, partition, partition},
		"by type, any device":          {"any", attributes + `.type == "mig"`, partition, partition},

		// The price: whether it is there says nothing.
		"there, any device":     {"any", `"profile" in ` + attributes, whole, partition},
		"not there":             {"gpu", `!("profile" in ` + attributes + `)`, "", whole},
		"not there or empty":    {"gpu", attributes + `.?profile.orValue("") == ""`, whole, whole},
		"whole GPUs by type":    {"any", attributes + `.type == "gpu"`, whole, whole},
		"whole GPUs by profile": {"any", attributes + `.profile == ""`, whole, fails},
	}
	published := mustInventory(t, mixedNode(t)).ResourceSlices(testOptions)
	asOfNVIDIA := withoutProfiles(published)
	allocated := func(objects []resourceapi.ResourceSlice, class, selector string) string {
		claims, err := newScheduler(t, objects).try(request(class, 1, selector))
		switch {
		case err != nil:
			return fails
		case len(claims) == 0:
			return ""
		}
		return claims[0][0]
	}
	for name, tc := range tests {
		if got := allocated(published, tc.class, tc.selector); got != tc.empty {
			t.Errorf("%s, where it is empty: %q, want %q", name, got, tc.empty)
		}
		if got := allocated(asOfNVIDIA, tc.class, tc.selector); got != tc.absent {
			t.Errorf("%s, where it is absent: %q, want %q", name, got, tc.absent)
		}
	}
}

// withoutProfiles leaves the attribute out where it is empty.
func withoutProfiles(published []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	var out []resourceapi.ResourceSlice
	for n := range published {
		object := published[n].DeepCopy()
		for _, d := range object.Spec.Devices {
			if *d.Attributes["profile"].StringValue == "" {
				delete(d.Attributes, "profile")
			}
		}
		out = append(out, *object)
	}
	return out
}
