// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
)

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
			if diff := cmp.Diff(test.want, mustDecode(t, []byte(head+test.policy)).UnknownProfiles(test.gpus)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	const want = `The sharing policy's rule "a" names MIG profiles that no GPU of this node has to which it applies: 1g.11gb. They have 1g.5gb, 2g.10gb; correct the policy, or have rules for each model`
	if got := (UnknownProfiles{Rule: "a", Missing: []string{"1g.11gb"}, Has: []string{"1g.5gb", "2g.10gb"}}).String(); got != want {
		t.Errorf("got %s", got)
	}
}
