// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
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
			expect.Same(t, p.For(a100()), want, "offer")
		})
	}
	if (Match{PCIDeviceID: "10de:20b2"}).matches(&gpu.GPU{}) {
		t.Error("a GPU of which the driver tells no ID has one")
	}
}

// TestSlashInName: a product's name is no path.
func TestSlashInName(t *testing.T) {
	for glob, want := range map[string]bool{"*6000*": true, "*8000": true, "quadro rtx 6000/8000": true, "*6000?8000": true, "*6000": false} {
		expect.Same(t, (Match{ProductName: glob}).matches(&gpu.GPU{ProductName: "Quadro RTX 6000/8000"}), want, glob)
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
		expect.Same(t, p.For(g).String(), want, g.ProductName)
	}
}

func TestNilPolicyIsBuiltin(t *testing.T) {
	var p *Policy
	expect.Same(t, p.For(a100()), Builtin().For(a100()), "offer")
	checkValid(t, Builtin())
	expect.Same(t, (&Policy{}).For(a100()).String(), "default: nothing", "offer of a policy without anything")
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
			expect.Same(t, test.earlier.covers(test.later), test.want, "covers")
		})
	}
}

// TestArchitectures: rules can ask for what hardware access calls GPUs, and for
// nothing else.
func TestArchitectures(t *testing.T) {
	source := must.Get(os.ReadFile("../gpu/nvml/names.go"))(t)
	var want []string
	for _, found := range regexp.MustCompile(`nvml\.DEVICE_ARCH_\w+: +"([^"]+)"`).FindAllStringSubmatch(string(source), -1) {
		want = append(want, found[1])
	}
	if len(want) == 0 || !slices.Equal(want, architectures) {
		t.Errorf("package nvml has %q, this one %q", want, architectures)
	}
}

func TestUnknownProfiles(t *testing.T) {
	with := func(product string, profiles ...string) gpu.GPU {
		g := gpu.GPU{ProductName: product, MIG: &gpu.MIG{}}
		for _, name := range profiles {
			g.MIG.Profiles = append(g.MIG.Profiles, gpu.Profile{Name: name})
		}
		return g
	}
	small, large := with("A100 40GB", "1g.5gb", "2g.10gb"), with("A100 80GB", "1g.10gb", "1g.10gb+me")
	const (
		rule    = "rules: [{name: a, match: {productName: A100*}, offer: {mig: {profiles: [1g.10gb], shares: [{profiles: [1g.11gb], mps: {}}]}}}]"
		several = "default: {mig: {profiles: [1g.10gb, 1g.24gb]}}"
	)
	for name, test := range map[string]struct {
		policy string
		gpus   []gpu.GPU
		want   []UnknownProfiles
	}{
		"no profiles named": {"default: {kinds: [mig]}", []gpu.GPU{small}, nil},
		"all known":         {"default: {mig: {profiles: [1g.5gb]}}", []gpu.GPU{small}, nil},
		"a rule": {rule, []gpu.GPU{small, small}, []UnknownProfiles{
			{Rule: "a", Missing: []string{"1g.10gb", "1g.11gb"}, Has: []string{"1g.5gb", "2g.10gb"}},
		}},
		"one GPU of the rule has it": {rule, []gpu.GPU{small, large}, []UnknownProfiles{
			{Rule: "a", Missing: []string{"1g.11gb"}, Has: []string{"1g.10gb", "1g.10gb+me", "1g.5gb", "2g.10gb"}},
		}},
		"a rule for other GPUs":         {rule, []gpu.GPU{with("H100", "1g.12gb")}, nil},
		"no MIG":                        {rule, []gpu.GPU{{ProductName: "A100 vGPU"}}, nil},
		"the default is for all":        {several, []gpu.GPU{large}, nil},
		"nothing of the default's fits": {several, []gpu.GPU{small}, []UnknownProfiles{{Missing: []string{"1g.10gb", "1g.24gb"}, Has: []string{"1g.5gb", "2g.10gb"}}}},
	} {
		t.Run(name, func(t *testing.T) {
			expect.Same(t, mustDecode(t, []byte(head+test.policy)).UnknownProfiles(test.gpus), test.want, "unknown profiles")
		})
	}
	const want = `The sharing policy's rule "a" names MIG profiles that no GPU of this node has to which it applies: 1g.11gb. They have 1g.5gb, 2g.10gb; correct the policy, or have rules for each model`
	expect.Same(t, (UnknownProfiles{Rule: "a", Missing: []string{"1g.11gb"}, Has: []string{"1g.5gb", "2g.10gb"}}).String(), want, "text")
}

var update = flag.Bool("update", false, "rewrite the golden file")

// TestGolden has in one file what each of the examples means.
func TestGolden(t *testing.T) {
	var got strings.Builder
	files := examples(t, "valid")
	for _, path := range slices.Sorted(maps.Keys(files)) {
		p := mustDecode(t, files[path])
		got.WriteString(filepath.Base(path) + "\n")
		for _, rule := range p.Rules {
			got.WriteString("  " + rule.Match.String() + "\n    " + Effective{Offer: rule.Offer, Rule: rule.Name}.String() + "\n")
		}
		got.WriteString("  " + Effective{Offer: p.Default}.String() + "\n")
		health := "as built in"
		if !cmp.Equal(p.Health, Builtin().Health) {
			health = fmt.Sprint(p.Health)
		}
		got.WriteString("  health: " + health + "\n")
	}
	const golden = "testdata/valid.golden.txt"
	if *update {
		must.Do(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want := must.Get(os.ReadFile(golden))(t)
	expect.Same(t, got.String(), string(want), "rewrite it with -update when this is meant")
}
