// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package boards

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the chart's list of MIG profiles")

const chartList = "../../../deployments/helm/partage/mig/profiles.yaml"

// TestChartHasAllProfiles: the chart makes classes for the MIG profiles of all boards.
func TestChartHasAllProfiles(t *testing.T) {
	t.Parallel()
	var names []string
	for _, board := range Names() {
		node, err := Load(board)
		if err != nil {
			t.Fatal(err)
		}
		if mig := node.GPUs[0].MIG; mig != nil {
			for _, profile := range mig.Profiles {
				names = append(names, profile.Name)
			}
		}
	}
	slices.SortFunc(names, bySize)
	names = slices.Compact(names)
	if len(names) < 59 {
		t.Errorf("%d MIG profiles, want 59 at least", len(names))
	}
	want := `# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
# The MIG profiles of the boards in pkg/kubectl/boards; make golden writes them.
- ` + strings.Join(names, "\n- ") + "\n"
	if *update {
		if err := os.WriteFile(chartList, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(chartList)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is not what the boards have; rewrite it with: make golden\n%s", chartList, got)
	}
}

// bySize compares names of profiles: slices first, then memory.
func bySize(a, b string) int {
	slicesOf := func(name string) (compute, memory int, variant string) {
		if n, _ := fmt.Sscanf(name, "%dg.%dgb%s", &compute, &memory, &variant); n < 2 {
			return 0, 0, name
		}
		return compute, memory, variant
	}
	aCompute, aMemory, aVariant := slicesOf(a)
	bCompute, bMemory, bVariant := slicesOf(b)
	return cmp.Or(cmp.Compare(aCompute, bCompute), cmp.Compare(aMemory, bMemory), cmp.Compare(aVariant, bVariant))
}
