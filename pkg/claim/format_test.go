// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/partition"
)

// formats has what versions of the driver have written.
const formats = "journal/testdata/formats"

// TestEveryFormat releases claims by what any version of the driver has written of
// them.
func TestEveryFormat(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(formats, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		runInBubble(t, filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			r, err := journal.Parse(data, "u1")
			if err != nil {
				t.Fatal(err)
			}
			b := newBox(t)
			m := b.manager()
			var want []string
			for i := range r.Devices {
				d := &r.Devices[i]
				switch {
				case d.Owned():
					if _, err := partition.New(b, holders{}).Ensure(t.Context(), d.Address(), partition.ExpectOurs, true); err != nil {
						t.Fatal(err)
					}
					b.rename(d.Address(), d.Partition.LiveUUID())
				case d.Type == journal.Static:
					b.makeForeign(d.Address())
					want = []string{"MIG mode of " + d.PCIAddress, "instance " + d.Address().String() + " complete=true"}
				}
			}
			write(t, m.store.Path("u1"), string(data))
			if _, err := m.Prepare(t.Context(), newClaim("u2", sliceA1)); err != nil && r.Devices[0].Type != device.Whole {
				t.Errorf("another claim: %v", err)
			}
			mustUnprepare(t, m, "u2")
			mustUnprepare(t, m, "u1")
			b.wantState(t, file, want)
		})
	}
}
