// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sandbox

import "testing"

func TestBelow(t *testing.T) {
	const shim = "/bin/shim"
	all := map[int]process{
		1: {0, "/bin/init"}, 2: {1, "/bin/kubelet"}, 3: {1, shim}, 4: {3, "/pause"}, 5: {4, "/bin/sh"},
		6: {99, "/bin/orphan"}, // its parent ended while the list was made
	}
	for pid, want := range map[int]bool{1: false, 2: false, 3: true, 4: true, 5: true, 6: false} {
		if got := below(pid, all, shim); got != want {
			t.Errorf("process %d: %v, want %v", pid, got, want)
		}
	}
}
