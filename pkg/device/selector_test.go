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

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// mixedNode has GPUs without MIG, with MIG fixed on and off, and dynamic.
func mixedNode(t *testing.T) *gpu.Node {
	t.Helper()
	node := &gpu.Node{DriverVersion: "580.95.05", CUDAVersion: gpu.Version{Major: 13}}
	for n, board := range []string{"t4", "a30", "a100-40", "rtx-pro-6000", "h100-80-sxm"} {
		g := loadNode(t, board).GPUs[0]
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", n+1)
		if board == "a100-40" {
			g.MIG.Enabled = true
		}
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
			if got := s.allocate(request(tc.class, 1, tc.selectors...)); got != tc.want {
				t.Errorf("allocated %q, want %q", got, tc.want)
			}
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
			if got := s.allocate(request(class, 1, "!("+reading(names)+")")); got != "" {
				t.Errorf("class %s: allocated %q", class, got)
			}
		}
		if len(asked) != 6 {
			t.Errorf("%d classes", len(asked))
		}
	}
}

// TestPinnedBySelector allocates layouts from the full list. A test-only
// attribute holds the device's name, as nothing that is published says where a
// partition is placed.
func TestPinnedBySelector(t *testing.T) {
	for _, board := range []string{"h100-80-sxm", "rtx-pro-6000"} {
		i := mustInventory(t, loadNode(t, board))
		objects := i.ResourceSlices(testOptions)
		for n := range objects {
			for m := range objects[n].Spec.Devices {
				d := &objects[n].Spec.Devices[m]
				d.Attributes["testName"] = resourceapi.DeviceAttribute{StringValue: &d.Name}
			}
		}
		mig := i.Devices()[0].GPU.MIG
		layouts := 0
		visitLegal(mig, func(layout []PartitionShape) {
			if !maximal(mig, layout) {
				return
			}
			if layouts++; layouts%24 != 1 {
				return
			}
			// All claims in one attempt, as the pods of a gang would have it.
			var requests []resourceapi.DeviceRequest
			var want [][]string
			for _, shape := range layout {
				name := nameOf(t, i, shape)
				requests = append(requests, request("mig", 1, `device.attributes["gpu.nvidia.com"].testName == "`+name+`"`))
				want = append(want, []string{name})
			}
			got, err := newScheduler(t, objects).try(requests...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: layout (-want +got):\n%s", board, diff)
			}
		})
	}
}

// TestSevenAfterEachOther allocates 1g one after the other on an 8-slice GPU
// and looks which larger profiles still find a place.
func TestSevenAfterEachOther(t *testing.T) {
	profile := func(name string) resourceapi.DeviceRequest {
		return request("mig", 1, `device.attributes["gpu.nvidia.com"].profile == "`+name+`"`)
	}
	// What is left after so many 1g. The best that any choice could keep is the
	// same, but for the one case that no fixed order can have both ways: four
	// 1g in the lower half would keep 3g.
	want := []string{
		"7g.80gb 4g.40gb 3g.40gb 2g.20gb 1g.20gb",
		"4g.40gb 3g.40gb 2g.20gb 1g.20gb",
		"4g.40gb 3g.40gb 2g.20gb 1g.20gb",
		"4g.40gb 3g.40gb 2g.20gb 1g.20gb",
		"2g.20gb 1g.20gb",
		"2g.20gb 1g.20gb",
		"",
		"",
	}
	starts := []int{6, 4, 5, 2, 3, 0, 1}
	i := mustInventory(t, loadNode(t, "h100-80-sxm"))
	s := newScheduler(t, i.ResourceSlices(testOptions))
	for n, left := range want {
		var fit []string
		for _, name := range []string{"7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.20gb"} {
			if s.holding().allocate(profile(name)) != "" {
				fit = append(fit, name)
			}
		}
		if got := strings.Join(fit, " "); got != left {
			t.Errorf("beside %d 1g there is room for %q, want %q", n, got, left)
		}
		got := s.allocate(profile("1g.10gb"))
		if n == len(starts) {
			if got != "" {
				t.Errorf("an eighth 1g: %s", got)
			}
			return
		}
		if want := fmt.Sprintf("gpu-0000-1b-00-0-mig-1g10gb-%d", starts[n]); got != want {
			t.Errorf("1g number %d is %q, want %q", n+1, got, want)
		}
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
	boards := map[string]*gpu.Node{}
	for _, b := range testBoards(t) {
		boards[b.name] = b.node
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, mustInventory(t, boards[tc.board]).ResourceSlices(testOptions))
			for n, profile := range tc.want {
				if s.allocate(request("mig", 1, `device.attributes["gpu.nvidia.com"].profile == "`+profile+`"`)) == "" {
					t.Errorf("no room for %s after %v", profile, tc.want[:n])
				}
			}
		})
	}
}

// TestWithoutCounters: what is left can be allocated by an allocator that
// knows nothing of counters, and nothing overlaps.
func TestWithoutCounters(t *testing.T) {
	o := testOptions
	o.PartitionableDevices = false
	i := mustInventory(t, mixedNode(t))
	objects := i.ResourceSlices(o)
	want := []string{"gpu-0000-01-00-0", "gpu-0000-02-00-0", "gpu-0000-04-00-0", "gpu-0000-05-00-0"}
	var got []string
	for _, d := range devicesOf(objects) {
		got = append(got, d.Name)
		if d.ConsumesCounters != nil {
			t.Errorf("%s consumes counters", d.Name)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if len(objects) != len(want) {
		t.Errorf("%d slices for %d GPUs", len(objects), len(want))
	}
	checkAPI(t, objects)
	s := newScheduler(t, objects)
	for _, name := range want {
		if got := s.allocate(request("any", 1)); got != name {
			t.Errorf("allocated %q, want %q", got, name)
		}
	}
	if got := s.allocate(request("any", 1)); got != "" {
		t.Errorf("allocated %q from nothing", got)
	}
}
