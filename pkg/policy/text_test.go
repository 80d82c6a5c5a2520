// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden file")

func TestString(t *testing.T) {
	for want, e := range map[string]Effective{
		`rule "a100-as-28": gpu; mig 1g.10gb, 3g.40gb; mig shares 1g.10gb: timeslice 4 clients; mps 8 clients, memory x1.5, 512Mi reserved; timeslice 4 clients, interval Short`: {
			Rule: "a100-as-28",
			Offer: Offer{
				Whole: true,
				Partition: &PartitionOffer{
					Profiles: []string{"1g.10gb", "3g.40gb"},
					Shares:   []PartitionShares{{Profiles: []string{"1g.10gb"}, TimeSlice: &TimeSliceOffer{Clients: 4}}},
				},
				MPS:       &MPSOffer{Clients: 8, MemoryOvercommit: 1.5, ComputeOvercommit: 1, ReservedMemoryBytes: 512 << 20},
				TimeSlice: &TimeSliceOffer{Clients: 4, Interval: IntervalShort, MemoryOvercommit: 1},
			},
		},
		`default: mig shares 1g.10gb, 2g.20gb: mps 2 clients, compute x2 and timeslice 1 client, memory x3`: {
			Offer: Offer{Partition: &PartitionOffer{Profiles: []string{}, Shares: []PartitionShares{{
				Profiles:  []string{"1g.10gb", "2g.20gb"},
				MPS:       &MPSOffer{Clients: 2, ComputeOvercommit: 2},
				TimeSlice: &TimeSliceOffer{Clients: 1, MemoryOvercommit: 3, Interval: IntervalDefault},
			}}}},
		},
		`default: gpu; mig all profiles but variants; mps 4 clients; timeslice 4 clients`: {Offer: Builtin().Default},
		"default: nothing": {},
	} {
		if got := e.String(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

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
		got.WriteString("  health: " + p.Health.String() + "\n")
	}
	const golden = "testdata/valid.golden.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("rewrite it with -update when this is meant; -want +got:\n%s", diff)
	}
}
