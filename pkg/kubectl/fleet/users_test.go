// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// TestDeleteCommand: what a claim's status says of its users is for nobody to check, and no name may be more than one.
func TestDeleteCommand(t *testing.T) {
	if got, want := fleet.DeleteCommand("pod", "team", "web-0", "web-1"), "kubectl delete pod -n team web-0 web-1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for _, name := range []string{"a b", "a;reboot", "$(reboot)", "a\nkubectl delete namespace team", "--all", ""} {
		for _, got := range []string{fleet.DeleteCommand("pod", "team", "web-0", name), fleet.DeleteCommand(name, "team", "web-0"), fleet.DeleteCommand("pod", name, "web-0")} {
			if !strings.HasPrefix(got, "# ") || strings.Contains(got, "\n") {
				t.Errorf("%q becomes %q", name, got)
			}
		}
	}
}
