// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"regexp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
)

func TestGPUName(t *testing.T) {
	for address, want := range map[string]string{
		"0000:1b:00.0":  "gpu-0000-1b-00-0",
		"0000:1B:00.0":  "gpu-0000-1b-00-0",
		"10000:e1:00.0": "gpu-10000-e1-00-0",
	} {
		expect.Same(t, GPUName(address), want, address)
	}
}

func TestProfileText(t *testing.T) {
	for name, want := range map[string]string{
		"1g.10gb":        "1g10gb",
		"1g.10gb+me":     "1g10gb-me",
		"1g.24gb-me":     "1g24gb-no-me",
		"1g.24gb+me.all": "1g24gb-me-all",
		"1g.24gb+gfx":    "1g24gb-gfx",
		"1G.5GB":         "1g5gb",
		"1g.5gb+":        "1g5gb",
		" 1g/5gb ":       "1g5gb",
		"+":              "",
	} {
		expect.Same(t, profileText(name), want, name)
	}
}

// TestProfileTextsThatClash: names stay unique and valid whatever the driver
// calls its profiles.
func TestProfileTextsThatClash(t *testing.T) {
	long := "1g.10gb+" + strings.Repeat("x", 60)
	mig := &gpu.MIG{Dynamic: true, MemorySlices: 2}
	for id, name := range []string{"1g.10gb", "1g.1.0gb", "1g.10gb+me.all", "1g.10gb+me+all", long, "", "+me", "1g.5gb"} {
		mig.Profiles = append(mig.Profiles, gpu.Profile{
			ID: uint32(id), Name: name, Slices: 1, MaxInstances: 2,
			Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 1, Size: 1}},
		})
	}
	want := map[uint32]string{0: "p0", 1: "p1", 2: "p2", 3: "p3", 4: "p4", 5: "p5", 6: "me", 7: "1g5gb"}
	expect.Same(t, profileTexts("gpu-0000-1b-00-0", mig), want, "texts")
	i := mustInventory(t, &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: "0000:1b:00.0", MIG: mig}}})
	seen := map[string]bool{}
	for _, d := range i.Devices() {
		if seen[d.Name] || len(validation.IsDNS1123Label(d.Name)) > 0 {
			t.Errorf("name %q", d.Name)
		}
		seen[d.Name] = true
	}
	expect.Same(t, len(seen), 18, "devices")
}

func TestSemanticVersion(t *testing.T) {
	for version, want := range map[string]string{
		"580.95.05":                        "580.95.5",
		"535.104.05-open":                  "535.104.5+open",
		"535.104.05":                       "535.104.5",
		"550.54":                           "550.54.0",
		"610":                              "610.0.0",
		"580.95.05.01":                     "580.95.5+01",
		"580.95.05+grid_1 beta":            "580.95.5+grid.1.beta",
		"v1.02.003":                        "1.2.3",
		"000.00.00":                        "0.0.0",
		"":                                 "0.0.0",
		"unknown":                          "0.0.0+unknown",
		"r580.95":                          "0.0.0+r580.95",
		"é":                                "0.0.0",
		"12345678901.1":                    "123456789.0.0+01.1",
		"1.2.3-" + strings.Repeat("x", 80): "1.2.3+" + strings.Repeat("x", 58),
		"1.2.3-" + strings.Repeat("x", 57) + ".y": "1.2.3+" + strings.Repeat("x", 57),
	} {
		expect.Same(t, semanticVersion(version), want, version)
	}
	expect.Same(t, twoPartVersion(gpu.Version{Major: 12, Minor: 9}), "12.9.0", "12.9")
}

func TestAddressIn(t *testing.T) {
	for name, want := range map[string]string{
		"gpu-0000-1b-00-0":                     "0000:1b:00.0",
		"gpu-0000-1b-00-0-mig-1g10gb-6-static": "0000:1b:00.0",
		"gpu-00010000-df-1f-7-observer":        "00010000:df:1f.7",
		"gpu-0000-1b-00-0x":                    "",
		"gpu-0-mig-1g24gb-19-0":                "", // NVIDIA's driver
		"gpu-0":                                "",
		"":                                     "",
	} {
		expect.Same(t, AddressIn(name), want, name)
		if want != "" && !IsOf(want, name) {
			t.Errorf("%s is not of %s", name, want)
		}
	}
}

func FuzzSemanticVersion(f *testing.F) {
	for _, seed := range []string{"580.95.05", "535.104.05-open", "", "1..2", "-1.2", "1.2.3-" + strings.Repeat("a.", 40)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, version string) {
		if got := semanticVersion(version); !semver.MatchString(got) || len(got) > 64 {
			t.Errorf("semanticVersion(%q) is %q", version, got)
		}
	})
}

func FuzzProfileText(f *testing.F) {
	for _, seed := range []string{"1g.10gb+me", "1g.24gb-me", "", "--", "1g.24gb+me.all"} {
		f.Add(seed)
	}
	label := regexp.MustCompile(`^([a-z0-9]+(-[a-z0-9]+)*)?$`)
	f.Fuzz(func(t *testing.T, name string) {
		if got := profileText(name); !label.MatchString(got) {
			t.Errorf("profileText(%q) is %q", name, got)
		}
	})
}
