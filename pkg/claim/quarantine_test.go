// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func (b *box) quarantined(boot string) []string {
	b.t.Helper()
	files, err := filepath.Glob(filepath.Join(b.dataDir(), "quarantine", boot, "*"))
	if err != nil {
		b.t.Fatal(err)
	}
	for i := range files {
		files[i] = filepath.Base(files[i])
	}
	return files
}

func TestDamagedRecord(t *testing.T) {
	for name, damage := range map[string]string{"empty": "", "cut off": `{"apiVersion":"journal`, "zeros": "\x00\x00\x00", "other claim": `{"apiVersion":"record.partage.dev/v1","kind":"ClaimRecord","claim":{"uid":"u9"}}`} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0))
			write(t, m.store.Path("u1"), damage)

			// Other claims go on.
			mustPrepare(t, m, newClaim("u2", sliceA4))
			// The place of the claim is not given away, nor is it taken for a
			// partition of somebody else's.
			_, err := m.Prepare(t.Context(), newClaim("u3", sliceA0))
			wantError(t, err, "was not made by this driver", "claims/u1.json")
			if status := m.Survey(t.Context()); len(status.Static) != 0 || len(status.Conditions) != 1 ||
				!strings.Contains(status.Conditions[0].Message, "claims/u1.json") {
				t.Errorf("before it is set aside: %+v", status)
			}
			wantError(t, m.Reconcile(t.Context()), "claim u1: the journal of claim u1 was damaged")
			b.wantWarnings([]string{"u1 DamagedClaimRecord", "quarantine/boot-1/u1.json", "nvidia-smi mig -dci and -dgi"})
			aside, err := os.ReadFile(filepath.Join(b.dataDir(), "quarantine/boot-1/u1.json"))
			if err != nil || string(aside) != damage {
				t.Errorf("set aside: %q, %v", aside, err)
			}
			mustReconcile(t, m)
			if status := m.Survey(t.Context()); len(status.Static) != 0 || len(status.Conditions) != 1 ||
				!strings.Contains(status.Conditions[0].Message, "quarantine/boot-1/u1.json") {
				t.Errorf("when it is set aside: %+v", status)
			}

			// What the claim had follows from the allocation, so that it is found again.
			live, _ := b.look(addressA0)
			mustPrepare(t, m, newClaim("u1", sliceA0))
			if now, _ := b.look(addressA0); now != live || b.count(pciA) != 2 {
				t.Errorf("instances: %v", b.state())
			}
			if files := b.quarantined("boot-1"); len(files) != 0 {
				t.Errorf("all is known again, and in quarantine are %v", files)
			}
			mustUnprepare(t, m, "u1")
			mustUnprepare(t, m, "u2")
			b.wantWarnings()
			b.wantNothing()
		})
	}
}

// Unprepare has nothing to go by: it says so once, and the partition stays. So does the
// file, until nothing is there that it could be about.
func TestDamagedRecordIsUnprepared(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.makeForeign(addressA0) // it may be the claim's
	mustPrepare(t, m, newClaim("u1", sliceA1))
	damaged := strings.Replace(recordText(t, m, "u1"), `"prepared"`, `7`, 1)
	mustUnprepare(t, m, "u1")
	for _, want := range [][]string{{"u1.json"}, {"u1.json", "u1.json-2"}} {
		mustPrepare(t, m, newClaim("other", sliceA4))
		write(t, m.store.Path("u1"), damaged)
		err := m.Unprepare(t.Context(), "u1")
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || filepath.Base(corrupt.Path) != want[len(want)-1] {
			t.Errorf("got %v", err)
		}
		mustUnprepare(t, m, "u1")
		if _, there := b.specs["u1"]; there {
			t.Error("the spec is left")
		}
		if diff := cmp.Diff(want, b.quarantined("boot-1")); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
	b.wantWarnings([]string{"u1 DamagedClaimRecord", "u1.json-2."}, []string{"u1 DamagedClaimRecord", "u1.json."})
	b.removeForeign(addressA0)
	mustUnprepare(t, m, "u1")
	if files := b.quarantined("boot-1"); len(files) != 0 {
		t.Errorf("nothing of the claim is left, and in quarantine are %v", files)
	}
	b.makeForeign(addressA0)
	write(t, m.store.Path("u1"), "{")
	wantError(t, m.Unprepare(t.Context(), "u1"), "damaged")
	// With the next boot the partitions are gone, and the files mean nothing.
	b.boot("boot-2")
	m = b.manager()
	if status := m.Survey(t.Context()); len(status.Static) != 1 || len(status.Conditions) != 0 {
		t.Errorf("after a reboot: %+v", status)
	}
}

// A record of another version is neither read nor touched, and told of once.
func TestRecordOfAnotherVersion(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.makeForeign(addressA4)
	const content = `{"apiVersion":"record.partage.dev/v3","kind":"ClaimRecord","claim":{"uid":"u1"}}`
	write(t, m.store.Path("u1"), content)
	for range 2 {
		_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
		wantError(t, err, "u1.json", "written by another version of the driver", `"record.partage.dev/v3"`)
		wantError(t, m.Unprepare(t.Context(), "u1"), "written by another version of the driver")
		wantError(t, m.Reconcile(t.Context()), "claim u1", "written by another version of the driver")
	}
	b.wantWarnings([]string{"u1 ClaimRecordOfOtherVersion", "claims/u1.json"})
	if status := m.Survey(t.Context()); len(status.Static) != 0 || len(status.Conditions) != 1 ||
		!strings.Contains(status.Conditions[0].Message, "claims/u1.json") {
		t.Errorf("got %+v", status)
	}
	mustPrepare(t, m, newClaim("u2", sliceA0))
	if got, err := os.ReadFile(m.store.Path("u1")); err != nil || string(got) != content {
		t.Errorf("got %q, %v", got, err)
	}
}
