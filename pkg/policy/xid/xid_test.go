// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package xid

import (
	"flag"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "rewrite docs/reference/xids.md")

func TestTable(t *testing.T) {
	table := must.Get(parse(xidTable))(t)
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
		if x := Lookup(number); x.Effect != policy.EffectNone || x.Number != number || x.Scope != Partition || x.Advice == "" {
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
	table := page.NewTable("XID", "what it is", "NVIDIA's action", "is about", "effect", "over after", "advice")
	about := map[Scope]string{Application: "a program", Partition: "partition", WholeGPU: "GPU"}
	over := map[Recovery]string{Quiet: "a quiet time", Reset: "a reset"}
	for _, x := range Table() {
		action, ends := "", over[x.Recovery]
		if x.Action != "" {
			action = page.Code(x.Action)
		}
		if x.Effect == policy.EffectIgnore {
			ends = ""
		}
		table.Row(strconv.FormatUint(x.Number, 10), x.Name, action, about[x.Scope], page.Code(string(x.Effect)), ends, x.Advice)
	}
	page.Generated(t, *update, "docs/reference/xids.md", table.String())
}
