// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"
)

// TestUnlisted: a GPU on the PCI bus that the driver has never listed is told as long as that
// lasts, and when it is over. One that was listed before has a condition instead.
func TestUnlisted(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.policy.set(onlyWhole(), nil)
	unlisted := func(addresses ...string) {
		node := testNodeWith(firstGPU)
		node.Unlisted = addresses
		s.hardware.setNode(node)
	}
	told := func(when string, want int, last string) {
		t.Helper()
		s.discover()
		s.poll(0)
		got := s.events.list()
		if len(got) != want {
			t.Fatalf("%s: %d events, want %d: %q", when, len(got), want, got)
		}
		if want > 0 && !strings.HasPrefix(got[want-1], last) {
			t.Errorf("%s: got %q, want it to begin with %q", when, got[want-1], last)
		}
	}
	unlisted()
	told("at first", 0, "")
	unlisted(secondGPU)
	told("when one is there", 1, "GPUNotListed: GPU "+secondGPU+": it is on the PCI bus")
	told("again", 1, "GPUNotListed")
	unlisted()
	told("when it is over", 2, "GPURecovered: GPU "+secondGPU)
	unlisted(firstGPU)
	told("one that is known", 2, "GPURecovered")
}
