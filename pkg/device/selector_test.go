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
)

// mixedNode has GPUs without MIG, with MIG fixed on and off, and dynamic.
func mixedNode(t *testing.T) *gpu.Node {
	t.Helper()
	node := &gpu.Node{DriverVersion: "580.95.05", CUDAVersion: gpu.Version{Major: 13}}
	for n, board := range []string{"t4", "a30", "a100-40-mig", "rtx-pro-6000", "h100-80-sxm"} {
		g := loadNode(t, board).GPUs[0]
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", n+1)
		node.GPUs = append(node.GPUs, g)
	}
	return node
}

// TestSelectors runs what users write on a node that has a bit of everything.
// A selector that fails on any device would end the attempt with an error.
func TestSelectors(t *testing.T) {
	const gib80 = `device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("80Gi")) >= 0`
	tests := map[string]struct {
		class     string
		selectors []string
		want      string
	}{
		"any whole GPU":        {"gpu", nil, "gpu-0000-01-00-0"},
		"any partition":        {"mig", nil, "gpu-0000-03-00-0-mig-1g5gb-6"},
		"profile":              {"mig", []string{`device.attributes["gpu.nvidia.com"].profile == "2g.20gb"`}, "gpu-0000-05-00-0-mig-2g20gb-4"},
		"profile of no device": {"mig", []string{`device.attributes["gpu.nvidia.com"].profile == "1g.99gb"`}, ""},
		// That devices without a profile have an empty one is why selectors need no guard; the price is that its presence says nothing.
		"profile, any device":       {"any", []string{`device.attributes["gpu.nvidia.com"].profile == "1g.5gb"`}, "gpu-0000-03-00-0-mig-1g5gb-6"},
		"profile is there, any one": {"any", []string{`"profile" in device.attributes["gpu.nvidia.com"]`}, "gpu-0000-01-00-0"},
		"memory alone takes the smallest": {
			"any", []string{`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("18Gi")) >= 0 && device.attributes["gpu.nvidia.com"].architecture == "Hopper"`},
			"gpu-0000-05-00-0-mig-1g20gb-6"},
		"much memory": {"any", []string{gib80}, "gpu-0000-04-00-0-mig-4g96gb-0"},
		"guarantees instead of a mechanism": {
			"any", []string{`device.attributes["gpu.nvidia.com"].isolation == "hardware"`, gib80}, "gpu-0000-04-00-0-mig-4g96gb-0"},
		"engines that are not known do not count": {
			"gpu", []string{`device.capacity["gpu.nvidia.com"].multiprocessors.isGreaterThan(quantity("0"))`}, "gpu-0000-02-00-0"},
		"a decoder": {
			"mig", []string{`device.capacity["gpu.nvidia.com"].decoders.compareTo(quantity("1")) >= 0`}, "gpu-0000-03-00-0-mig-1g5gb-me-6"},
		"without media engines": {
			"mig", []string{`device.attributes["gpu.nvidia.com"].profile.endsWith("-me")`}, "gpu-0000-04-00-0-mig-1g24gb-no-me-6"},
		"versions": {
			"gpu", []string{`device.attributes["gpu.nvidia.com"].driverVersion.compareTo(semver("580.95.5")) == 0 &&
				device.attributes["gpu.nvidia.com"].cudaDriverVersion.isGreaterThan(semver("12.9.0")) &&
				device.attributes["gpu.nvidia.com"].cudaComputeCapability.compareTo(semver("9.0.0")) >= 0`}, "gpu-0000-04-00-0"},
		"what all kinds have":                    {"any", []string{reading(namesOfAll)}, "gpu-0000-01-00-0"},
		"what the kind of the class has":         {"mps", []string{reading(namesOfKind[MPS])}, "gpu-0000-01-00-0-mps"},
		"what partitions have, in their class":   {"mig", []string{reading(namesOfKind[Partition])}, "gpu-0000-03-00-0-mig-1g5gb-6"},
		"what whole GPUs have, in their class":   {"gpu", []string{reading(namesOfKind[Whole])}, "gpu-0000-01-00-0"},
		"what the others lack, after a question": {"any", []string{`"pciBusID" in device.attributes["resource.kubernetes.io"] && device.attributes["resource.kubernetes.io"].pciBusID == "0000:02:00.0"`}, "gpu-0000-02-00-0"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, mustInventory(t, mixedNode(t)).ResourceSlices(testOptions))
			expect.Same(t, s.allocate(request(tc.class, 1, tc.selectors...)), tc.want, "allocated")
		})
	}
}

// reading returns an expression that reads attributes and capacities, and is true of any device
// that has them.
func reading(names []resourceapi.QualifiedName) string {
	terms := []string{`device.allowMultipleAllocations in [true, false]`}
	for _, name := range names {
		id, domain := string(name), testOptions.Driver
		if before, after, found := strings.Cut(id, "/"); found {
			domain, id = before, after
		}
		of := "attributes"
		if _, is := capacityTexts[id]; is {
			of = "capacity"
		}
		read := fmt.Sprintf("device.%s[%q].%s", of, domain, id)
		terms = append(terms, fmt.Sprintf("%s == %s", read, read))
	}
	return strings.Join(terms, " && ")
}

// TestSelectorOnEveryDevice evaluates selectors that no device matches, so that all of them are
// looked at, with every kind of device there is: one that reads what all kinds have, in a class
// that admits all, and one that reads everything a kind has, in the class of this kind.
func TestSelectorOnEveryDevice(t *testing.T) {
	terms := keeping(sharing(
		policy.PartitionShares{Profiles: []string{"1g.5gb", "1g.10gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)},
		policy.PartitionShares{Profiles: []string{"2g.20gb"}, TimeSlice: timeSliceOf(2)}))
	terms.Keep["gpu-0000-05-00-0-mig-3g40gb-0-mps"] = true
	for _, terms.Limited = range []bool{false, true} {
		i := inventoryOf(t, mixedNode(t), terms).With(Status{Static: []Static{static("0000:05:00.0", profile1g, at(0, 1), "MIG-1")}})
		kinds := map[Kind]int{}
		for _, d := range i.Devices() {
			kinds[d.Kind]++
		}
		if len(kinds) != 4 || len(i.Withdrawn()) != 1 {
			t.Errorf("devices %v", kinds)
		}
		s := newScheduler(t, i.ResourceSlices(testOptions))
		asked := map[string][]resourceapi.QualifiedName{"any": namesOfAll}
		for kind, names := range namesOfKind {
			asked[string(kind)] = append(slices.Clone(namesOfAll), names...)
		}
		for class, names := range asked {
			expect.Same(t, s.allocate(request(class, 1, "!("+reading(names)+")")), "", "class "+class)
		}
		expect.Same(t, len(asked), 6, "classes")
	}
}

// TestSmallBesideLarge: whatever order the claims come in, these layouts come
// about without anybody choosing placements.
func TestSmallBesideLarge(t *testing.T) {
	tests := map[string]struct {
		board string
		want  []string // profiles in order of the claims
	}{
		"3g, then 4g":          {"h100-80-sxm", []string{"3g.40gb", "4g.40gb"}},
		"1g, 2g, then 4g":      {"h100-80-sxm", []string{"1g.10gb", "2g.20gb", "4g.40gb"}},
		"2g, 1g, then 4g":      {"h100-80-sxm", []string{"2g.20gb", "1g.10gb", "4g.40gb"}},
		"1g double, then 4g":   {"h100-80-sxm", []string{"1g.20gb", "4g.40gb", "1g.20gb"}},
		"1g by turns with 2g":  {"h100-80-sxm", []string{"1g.10gb", "2g.20gb", "1g.10gb", "2g.20gb", "1g.10gb"}},
		"three 2g and 1g":      {"h100-80-sxm", []string{"2g.20gb", "2g.20gb", "1g.10gb+me", "2g.20gb"}},
		"A30, 1g, 1g, then 2g": {"a30-mig", []string{"1g.6gb", "1g.6gb", "2g.12gb"}},
		"A30, 2g, then 1g":     {"a30-mig", []string{"2g.12gb", "1g.6gb", "1g.6gb+me"}},
		"RTX PRO, 1g and 2g":   {"rtx-pro-6000", []string{"1g.24gb", "2g.48gb", "1g.24gb+gfx"}},
		"RTX PRO, all engines": {"rtx-pro-6000", []string{"1g.24gb-me", "1g.24gb-me", "2g.48gb+me.all"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, mustInventory(t, loadNode(t, tc.board)).ResourceSlices(testOptions))
			for n, profile := range tc.want {
				if s.allocate(request("mig", 1, `device.attributes["gpu.nvidia.com"].profile == "`+profile+`"`)) == "" {
					t.Errorf("no room for %s after %v", profile, tc.want[:n])
				}
			}
		})
	}
}
