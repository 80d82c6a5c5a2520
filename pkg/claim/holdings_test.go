// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import "testing"

// TestHoldingsOfOneDevice: two shares of a device that a claim has are one, so that no metric
// is there twice; without a limit of one of them there is none.
func TestHoldingsOfOneDevice(t *testing.T) {
	t.Parallel()
	share := func(device string, limit int64) Holding {
		return Holding{Claim: Ref{UID: "u1"}, Device: device, MemoryLimitBytes: limit}
	}
	var all Holdings
	for _, h := range []Holding{share("a", 5), share("b", 7), share("a", 6), share("b", 0), {Claim: Ref{UID: "u2"}, Device: "a", MemoryLimitBytes: 1}} {
		all.add(h)
	}
	want := []struct {
		device string
		limit  int64
	}{{"a", 11}, {"b", 0}, {"a", 1}}
	if len(all.Held) != len(want) {
		t.Fatalf("%+v", all.Held)
	}
	for i, w := range want {
		if h := all.Held[i]; h.Device != w.device || h.MemoryLimitBytes != w.limit {
			t.Errorf("%d: %+v, want %+v", i, h, w)
		}
	}
}
