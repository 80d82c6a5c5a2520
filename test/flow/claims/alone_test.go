// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"testing"
)

// TestAlone: the first process of all that these tests and the drivers see is a part of this program, so that those of other
// tests on this machine use no GPU here.
func TestAlone(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	first, err := os.Stat("/proc/1/exe")
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(self, first) {
		t.Error("the first process in /proc is another program")
	}
}
