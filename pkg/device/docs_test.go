// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/docs/source"
)

var taintKey = regexp.MustCompile("`(?:gpu\\.nvidia\\.com|…)/([a-z-]+)`([^`(]*)(?:\\(`([A-Za-z]+)`\\))?")

// TestTaintsPage: docs/reference/taints.md has all taints, with their effects if these are not
// NoSchedule, and a star for those that the policy can change. What they mean and what to do is
// written by hand.
func TestTaintsPage(t *testing.T) {
	settable := policy.Builtin().Health.Conditions
	want := map[string]string{}
	for _, c := range source.Constants(source.Files(t, "."), "Reason") {
		note := ""
		effect, isSettable := settable[c.Value]
		// An XID has the effect that the policy, or else the table, has for its number.
		if isSettable || c.Value == string(XID) {
			note = "*"
		}
		if isSettable && effect != policy.EffectNoSchedule {
			note += fmt.Sprintf(" (`%s`)", effect)
		}
		want[c.Value] = note
	}
	found := 0
	for _, row := range page.Rows(t, "docs/reference/taints.md", "key", "the device", "it goes away", "what to do") {
		for _, key := range taintKey.FindAllStringSubmatch(row[0], -1) {
			got := ""
			if strings.Contains(key[2], "*") {
				got = "*"
			}
			if key[3] != "" {
				got += fmt.Sprintf(" (`%s`)", key[3])
			}
			note, exists := want[key[1]]
			if !exists {
				t.Errorf("there is no taint %s", key[1])
			} else if note != got {
				t.Errorf("the taint %s is followed by %q, want %q", key[1], got, note)
			}
			delete(want, key[1])
			found++
		}
		if slices.Contains(row, "") {
			t.Errorf("%s is not explained", row[0])
		}
	}
	for name, note := range want {
		t.Errorf("the page lacks | `gpu.nvidia.com/%s` %s | … | … | … |", name, note)
	}
	if t.Logf("%d cases", found); found < 18 {
		t.Errorf("only %d taints", found)
	}
}
