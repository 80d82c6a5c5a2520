// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestClaimed: a GPU is a claim's that has a device of it, and may be one's whose record
// cannot be read. Who watches it with admin access does not have it.
func TestClaimed(t *testing.T) {
	const first, second = "0000:11:00.0", "0000:16:00.0"
	newRecord := func(name string, devices ...record.Device) *record.Record {
		return &record.Record{Claim: record.Ref{Namespace: "team", Name: name, UID: "1"}, Devices: devices}
	}
	claims := heldClaims(&record.Snapshot{
		Records: []*record.Record{
			newRecord("watch", record.Device{PCIAddress: first, Admin: true}),
			newRecord("train", record.Device{PCIAddress: second}, record.Device{PCIAddress: second}),
		},
		Earlier: []*record.Record{newRecord("before", record.Device{PCIAddress: first})},
	})
	if len(claims) != 2 || len(claims[1].GPUs) != 1 {
		t.Errorf("got %+v", claims)
	}
	if got := claimed(claims, first); got != "" {
		t.Errorf("a GPU that is watched %s", got)
	}
	if got, want := claimed(claims, second), "has a device that is prepared for claim team/train (1)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	claims = heldClaims(&record.Snapshot{Guards: []record.Guard{{Claim: record.Ref{UID: "0af2"}}}})
	if got, want := claimed(claims, first), "may be that of claim 0af2, whose record cannot be read"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestUndoChecksGPU: nothing is undone on another GPU than the one that was changed.
func TestUndoChecksGPU(t *testing.T) {
	u := undo{PCIAddress: "0000:11:00.0", UUID: "GPU-a"}
	for name, test := range map[string]struct {
		gpus []gpu.GPU
		want string
	}{
		"the same":  {[]gpu.GPU{{PCIAddress: "0000:16:00.0", UUID: "GPU-b"}, {PCIAddress: "0000:11:00.0", UUID: "GPU-a"}}, ""},
		"exchanged": {[]gpu.GPU{{PCIAddress: "0000:11:00.0", UUID: "GPU-b"}}, "where GPU GPU-b is now"},
		"moved":     {[]gpu.GPU{{PCIAddress: "0000:16:00.0", UUID: "GPU-a"}}, "where none answers now"},
	} {
		err := u.check(test.gpus)
		if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}
