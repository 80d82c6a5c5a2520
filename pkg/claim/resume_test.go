// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReboot(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("goes", sliceA4))
	b.boot("boot-2")

	m = b.manager()
	if err := m.Resume(t.Context()); err != nil {
		t.Errorf("resume: %v", err)
	}
	if len(b.specs) != 0 || b.count(pciA) != 0 {
		t.Errorf("resume made something: %v", b.state())
	}
	// The place of a claim that was not released is taken by another: that one
	// must keep it.
	mustPrepare(t, m, newClaim("new", sliceA4))
	mustUnprepare(t, m, "goes")
	if _, found, _ := b.Find(t.Context(), addressA4); !found {
		t.Error("the release of a claim of an earlier boot destroyed another claim's partition")
	}
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	if len(b.specs["stays"]) != 2 || b.count(pciA) != 2 {
		t.Errorf("not made again: %v", b.state())
	}
	mustUnprepare(t, m, "stays")
	mustUnprepare(t, m, "new")
	b.wantNothing()
}

func TestResumeRewritesSpecs(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", sliceA0, wholeC))
	want := b.specs["u1"]
	b.mu.Lock()
	clear(b.specs)
	b.mu.Unlock()
	wantError(t, b.bareManager().Resume(t.Context()), "claim u1: its CDI spec is not checked")
	if err := b.manager().Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, b.specs["u1"]); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// One bad record does not stop the others.
func TestResumeGoesOn(t *testing.T) {
	b := newBox(t)
	for _, c := range []struct{ uid, device string }{{"u1", sliceA0}, {"u2", sliceB0}} {
		b.hooks(nil, killAt("create compute instance"))
		kill(func() { _, _ = b.manager().Prepare(t.Context(), newClaim(c.uid, c.device)) })
	}
	b.hooks(nil, nil)
	m := b.manager()
	write(t, m.journal.path("u0"), "{")
	write(t, m.journal.path("u3"), `{"apiVersion":"journal.partage.dev/v9","kind":"ClaimRecord"}`)
	wantError(t, m.Resume(t.Context()), "claim u0: the journal of claim u0 was damaged", "claim u3", "another version")
	want := []string{"claims/u0.json.corrupt-1", "claims/u3.json"}
	if diff := cmp.Diff(want, b.state()); diff != "" {
		t.Errorf("left: -want +got:\n%s", diff)
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestCorruptRecord(t *testing.T) {
	for name, damage := range map[string]string{"empty": "", "cut off": `{"apiVersion":"journal`, "zeros": "\x00\x00\x00", "other claim": `{"apiVersion":"journal.partage.dev/v1","kind":"ClaimRecord","claim":{"uid":"u9"}}`} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0))
			write(t, m.journal.path("u1"), damage)

			// Other claims go on.
			mustPrepare(t, m, newClaim("u2", sliceA4))

			// What the claim had follows from the allocation, so that it is found again.
			mustPrepare(t, m, newClaim("u1", sliceA0))
			if b.count(pciA) != 2 {
				t.Errorf("instances: %v", b.state())
			}
			aside, err := os.ReadFile(m.journal.path("u1") + ".corrupt-1")
			if err != nil || string(aside) != damage {
				t.Errorf("set aside: %q, %v", aside, err)
			}

			// Unprepare has nothing to go by: it says so once.
			write(t, m.journal.path("u1"), damage)
			err = m.Unprepare(t.Context(), "u1")
			var corrupt *CorruptError
			if !errors.As(err, &corrupt) || !strings.HasSuffix(corrupt.Path, "u1.json.corrupt-2") {
				t.Errorf("got %v", err)
			}
			mustUnprepare(t, m, "u1")
			if _, there := b.specs["u1"]; there {
				t.Error("the spec is left")
			}
			mustUnprepare(t, m, "u2")
		})
	}
}

// A record of another version is neither read nor touched.
func TestRecordOfAnotherVersion(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	const content = `{"apiVersion":"journal.partage.dev/v2","kind":"ClaimRecord","claim":{"uid":"u1"}}`
	write(t, m.journal.path("u1"), content)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, "u1.json", "written by another version of the driver", `"journal.partage.dev/v2"`)
	wantError(t, m.Unprepare(t.Context(), "u1"), "written by another version of the driver")
	mustPrepare(t, m, newClaim("u2", sliceA0))
	if got, err := os.ReadFile(m.journal.path("u1")); err != nil || string(got) != content {
		t.Errorf("got %q, %v", got, err)
	}
}
