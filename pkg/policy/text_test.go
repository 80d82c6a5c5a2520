// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

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
