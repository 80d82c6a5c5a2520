// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
)

func a100() *gpu.GPU {
	return &gpu.GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", PCIDeviceID: "10de:20b2",
		ProductName: "NVIDIA A100-SXM4-80GB", Architecture: "Ampere",
	}
}

func TestMatch(t *testing.T) {
	for name, test := range map[string]struct {
		match Match
		want  bool
	}{
		"glob":                      {Match{ProductName: "NVIDIA A100*"}, true},
		"glob, letter case":         {Match{ProductName: "nvidia a100-sxm4-*gb"}, true},
		"glob, set of letters":      {Match{ProductName: "NVIDIA [A-H]100*"}, true},
		"glob, one character":       {Match{ProductName: "NVIDIA A?00-SXM4-80GB"}, true},
		"glob, not from the start":  {Match{ProductName: "A100*"}, false},
		"glob, not up to the end":   {Match{ProductName: "NVIDIA A100"}, false},
		"glob that cannot be read":  {Match{ProductName: "NVIDIA [A100*"}, false},
		"architecture":              {Match{Architecture: "Ampere"}, true},
		"architecture, letter case": {Match{Architecture: "AMPERE"}, true},
		"other architecture":        {Match{Architecture: "Hopper"}, false},
		"PCI device ID":             {Match{PCIDeviceID: "10DE:20b2"}, true},
		"other PCI device ID":       {Match{PCIDeviceID: "10de:20b5"}, false},
		"UUID":                      {Match{UUID: "GPU-5C89852C-d268-c3f3-1b07-005d5ae1dc3f"}, true},
		"other UUID":                {Match{UUID: "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3e"}, false},
		"all fields":                {Match{ProductName: "*A100*", Architecture: "Ampere", PCIDeviceID: "10de:20b2", UUID: a100().UUID}, true},
		"all fields but one":        {Match{ProductName: "*A100*", Architecture: "Ampere", PCIDeviceID: "10de:20b5", UUID: a100().UUID}, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := &Policy{Rules: []Rule{{Name: "r", Match: test.match, Offer: Offer{Whole: true}}}}
			want := Effective{}
			if test.want {
				want = Effective{Rule: "r", Offer: Offer{Whole: true}}
			}
			if diff := cmp.Diff(want, p.For(a100())); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	if (Match{PCIDeviceID: "10de:20b2"}).matches(&gpu.GPU{}) {
		t.Error("a GPU of which the driver tells no ID has one")
	}
}

// TestSlashInName: a product's name is no path.
func TestSlashInName(t *testing.T) {
	for glob, want := range map[string]bool{"*6000*": true, "*8000": true, "quadro rtx 6000/8000": true, "*6000?8000": true, "*6000": false} {
		if got := (Match{ProductName: glob}).matches(&gpu.GPU{ProductName: "Quadro RTX 6000/8000"}); got != want {
			t.Errorf("%s matches is %t, want %t", glob, got, want)
		}
	}
}

func TestFirstMatchCounts(t *testing.T) {
	p := mustDecode(t, []byte(head+`
rules:
- {name: this-one, match: {uuid: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f}, offer: {kinds: [gpu]}}
- {name: a100, match: {productName: "*A100*"}, offer: {kinds: [mps]}}
- {name: ampere, match: {architecture: ampere}, offer: {kinds: [timeslice]}}
default: {kinds: [gpu, timeslice]}
`))
	other := a100()
	other.UUID = "GPU-00000000-0000-4000-8000-000000000000"
	a10 := &gpu.GPU{ProductName: "NVIDIA A10", Architecture: "Ampere"}
	for want, g := range map[string]*gpu.GPU{
		`rule "this-one": gpu`:               a100(),
		`rule "a100": mps 4 clients`:         other,
		`rule "ampere": timeslice 4 clients`: a10,
		`default: gpu; timeslice 4 clients`:  {ProductName: "Tesla T4", Architecture: "Turing"},
	} {
		if got := p.For(g).String(); got != want {
			t.Errorf("%s: got %s, want %s", g.ProductName, got, want)
		}
	}
}

func TestNilPolicyIsBuiltin(t *testing.T) {
	var p *Policy
	if diff := cmp.Diff(Builtin().For(a100()), p.For(a100())); diff != "" {
		t.Error(diff)
	}
	checkValid(t, Builtin())
	if got := (&Policy{}).For(a100()).String(); got != "default: nothing" {
		t.Errorf("a policy without anything offers %s", got)
	}
}

// TestCovers: a rule is only called unreachable when this is certain.
func TestCovers(t *testing.T) {
	for name, test := range map[string]struct {
		earlier, later Match
		want           bool
	}{
		"the same":             {Match{ProductName: "*A100*"}, Match{ProductName: "*a100*"}, true},
		"more is asked later":  {Match{Architecture: "Ampere"}, Match{Architecture: "ampere", PCIDeviceID: "10de:20b2"}, true},
		"less is asked later":  {Match{Architecture: "Ampere", PCIDeviceID: "10de:20b2"}, Match{Architecture: "Ampere"}, false},
		"something else":       {Match{ProductName: "*A100*"}, Match{Architecture: "Ampere"}, false},
		"everything":           {Match{ProductName: "*"}, Match{ProductName: "*A100*"}, true},
		"everything, by stars": {Match{ProductName: "**"}, Match{Architecture: "Ampere"}, true},
		"a glob within a glob": {Match{ProductName: "NVIDIA*"}, Match{ProductName: "nvidia A?00*"}, true},
		"one name":             {Match{ProductName: "*/*"}, Match{ProductName: "A100/80"}, true},
		"a glob that overlaps": {Match{ProductName: "NVIDIA*"}, Match{ProductName: "*A100"}, false},
		"a star is no letter":  {Match{ProductName: "A?"}, Match{ProductName: "A*"}, false},
		"letters in brackets":  {Match{ProductName: "*A-C*"}, Match{ProductName: "[A-C]"}, false},
		"a star that is meant": {Match{ProductName: `\*`}, Match{ProductName: "A100"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.earlier.covers(test.later); got != test.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

// TestArchitectures: rules can ask for what hardware access calls GPUs, and for
// nothing else.
func TestArchitectures(t *testing.T) {
	source, err := os.ReadFile("../gpu/nvml/names.go")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, found := range regexp.MustCompile(`nvml\.DEVICE_ARCH_\w+: +"([^"]+)"`).FindAllStringSubmatch(string(source), -1) {
		want = append(want, found[1])
	}
	if len(want) == 0 || !slices.Equal(want, architectures) {
		t.Errorf("package nvml has %q, this one %q", want, architectures)
	}
}
