// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/policy"
)

var update = flag.Bool("update", false, "rewrite docs/reference/xids.md")

func TestTable(t *testing.T) {
	table, err := parse(xidTable)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range table {
		if i > 0 && table[i-1].Number >= x.Number {
			t.Errorf("XID %d is not in order", x.Number)
		}
		if x.Name == "" || x.Advice == "" || strings.HasSuffix(x.Advice, ".") {
			t.Errorf("XID %d has the name %q and the advice %q", x.Number, x.Name, x.Advice)
		}
		if !slices.Contains([]Scope{Application, Partition, WholeGPU}, x.Scope) || !slices.Contains([]Recovery{Quiet, Reset}, x.Recovery) ||
			!slices.Contains([]policy.Effect{policy.EffectIgnore, policy.EffectNone, policy.EffectNoSchedule, policy.EffectNoExecute}, x.Effect) {
			t.Errorf("XID %d: %+v", x.Number, x)
		}
		if x.Scope == Application && x.Effect != policy.EffectIgnore {
			t.Errorf("XID %d is an error of a program and takes its device away", x.Number)
		}
		if got := Lookup(x.Number); got != x {
			t.Errorf("Lookup finds %+v", got)
		}
	}
	// As in NVIDIA's device plugin and DRA driver.
	for _, number := range []uint64{13, 31, 43, 45, 68, 109} {
		if x := Lookup(number); x.Scope != Application {
			t.Errorf("XID %d is no error of a program", number)
		}
	}
	for _, number := range []uint64{0, 1, 9999, 1 << 63} {
		if x := Lookup(number); x.Effect != policy.EffectNoSchedule || x.Number != number || x.Scope != Partition || x.Advice == "" {
			t.Errorf("an unknown XID: %+v", x)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"", "a,b\n", "h,h,h,h,h,h,h\nx,n,gpu,None,quiet,,\n", "h,h,h,h,h,h,h\n1,n,gpu\n", "\"\n"} {
		if table, err := parse([]byte(text)); err == nil {
			t.Errorf("%q is read as %v", text, table)
		}
	}
}

// TestDocs holds docs/reference/xids.md to the table.
func TestDocs(t *testing.T) {
	const path = "../../docs/reference/xids.md"
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, _, found := strings.Cut(string(content), "| XID |")
	if !found {
		t.Fatalf("%s has no table", path)
	}
	var table strings.Builder
	table.WriteString("| XID | what it is | NVIDIA's action | is about | effect | over after | advice |\n|---|---|---|---|---|---|---|\n")
	about := map[Scope]string{Application: "a program", Partition: "partition", WholeGPU: "GPU"}
	over := map[Recovery]string{Quiet: "a quiet time", Reset: "a reset"}
	for _, x := range Table() {
		action, ends := "", over[x.Recovery]
		if x.Action != "" {
			action = "`" + x.Action + "`"
		}
		if x.Effect == policy.EffectIgnore {
			ends = ""
		}
		fmt.Fprintf(&table, "| %d | %s | %s | %s | `%s` | %s | %s |\n", x.Number, x.Name, action, about[x.Scope], x.Effect, ends, x.Advice)
	}
	want := head + table.String()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(content)); diff != "" {
		t.Errorf("rewrite it with -update when this is meant; -want +got:\n%s", diff)
	}
}
