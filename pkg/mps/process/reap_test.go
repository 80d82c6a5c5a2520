// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"os/exec"
	"testing"
)

// TestReapedFirst: a process that Reap has waited for has ended like any other.
func TestReapedFirst(t *testing.T) {
	for range 300 {
		p, err := Start(exec.Command("true"))
		if err != nil {
			t.Fatal(err)
		}
		for ended := false; !ended; {
			p.ID.Reap()
			select {
			case <-p.Done():
				ended = true
			default:
			}
		}
		if exit := p.Exit(); exit.Killed() {
			t.Errorf("got %s", exit)
		}
	}
}
