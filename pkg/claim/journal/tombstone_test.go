// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

func mustBury(t *testing.T, s *Store, uid types.UID, arrived time.Duration) {
	t.Helper()
	if _, err := s.Bury(uid, arrived); err != nil {
		t.Fatal(err)
	}
}

func wantReleased(t *testing.T, s *Store, uid types.UID, since time.Duration, want bool) {
	t.Helper()
	if got, err := s.Released(uid, since); err != nil || got != want {
		t.Errorf("claim %s released after %s: got %v, want %v (%v)", uid, since, got, want, err)
	}
}

// TestTombstone shows which calls come too late, on any disk.
func TestTombstone(t *testing.T) {
	for name, files := range map[string]Files{"disk": OS{}, "full disk": &fullDisk{parts: []string{"/released/"}}} {
		t.Run(name, func(t *testing.T) {
			s := mustOpen(t, t.TempDir(), "boot-1", files)
			wantReleased(t, s, "u1", 0, false)
			mustBury(t, s, "u1", 20)
			mustBury(t, s, "u1", 15) // it was on its way for longer
			wantReleased(t, s, "u1", 19, true)
			wantReleased(t, s, "u1", 20, false)
			wantReleased(t, s, "u2", 0, false)
			mustBury(t, s, "u1", 30)
			wantReleased(t, s, "u1", 29, true)
			wantReleased(t, s, "u1", 30, false)
		})
	}
}

// TestTombstoneOfOtherProcess shows that processes know each other's, those of this boot.
func TestTombstoneOfOtherProcess(t *testing.T) {
	dir := t.TempDir()
	mustBury(t, mustOpen(t, dir, "boot-1", OS{}), "u1", 20)
	wantReleased(t, mustOpen(t, dir, "boot-1", OS{}), "u1", 10, true)
	wantReleased(t, mustOpen(t, dir, "boot-2", OS{}), "u1", 10, false)
}

// TestTombstoneOnceThereIsSpace shows that a later release is written down, and that an
// earlier one on the disk does not hide the one in memory.
func TestTombstoneOnceThereIsSpace(t *testing.T) {
	dir, files := t.TempDir(), &fullDisk{}
	s := mustOpen(t, dir, "boot-1", files)
	mustBury(t, s, "u1", 10)
	files.parts = []string{"/released/"}
	mustBury(t, s, "u1", 20)
	wantReleased(t, s, "u1", 15, true)
	files.parts = nil
	mustBury(t, s, "u1", 30)
	wantReleased(t, mustOpen(t, dir, "boot-1", OS{}), "u1", 25, true)
}

// TestRecordOfReleasedClaim: a record that is older than its claim's tombstone says that the claim is
// being released, to every process of this boot.
func TestRecordOfReleasedClaim(t *testing.T) {
	for name, test := range map[string]struct {
		arrived time.Duration // of the record; the claim is released at 20
		boot    string        // of the record
		on      Files
		want    State
	}{
		"older":                    {arrived: 10, boot: "boot-1", want: Unpreparing},
		"of the same time":         {arrived: 20, boot: "boot-1", want: Prepared},
		"prepared again":           {arrived: 30, boot: "boot-1", want: Prepared},
		"of an older version":      {boot: "boot-1", want: Prepared},
		"of another boot":          {arrived: 10, boot: "boot-0", want: Prepared},
		"tombstone in memory only": {arrived: 10, boot: "boot-1", on: &fullDisk{parts: []string{"/released/"}}, want: Prepared},
	} {
		t.Run(name, func(t *testing.T) {
			if test.on == nil {
				test.on = OS{}
			}
			s := mustOpen(t, t.TempDir(), "boot-1", test.on)
			r := small("u1", test.boot)
			r.State, r.Arrived = Prepared, test.arrived
			mustSave(t, s, r)
			if got, err := s.Read("u1"); err != nil || got.State != Prepared {
				t.Fatalf("before it is released: %+v, %v", got, err)
			}
			mustBury(t, s, "u1", 20)
			if got, err := s.Read("u1"); err != nil || got.State != test.want {
				t.Errorf("got %+v, %v, want %s", got, err, test.want)
			}
			snapshot, err := s.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			holds := len(snapshot.Holders()) == 1 && len(snapshot.Earlier) == 0
			if want := test.want == Prepared && test.boot == "boot-1"; holds != want {
				t.Errorf("it is a holder: %v, want %v", holds, want)
			}
		})
	}
}

// TestSweepTombstones removes those that no call can be older than.
func TestSweepTombstones(t *testing.T) {
	dir, files := t.TempDir(), &fullDisk{}
	s := mustOpen(t, dir, "boot-1", files)
	mustBury(t, s, "old", 0)
	mustBury(t, s, "busy", 0)
	for uid, arrived := range map[types.UID]time.Duration{"releasing": 1, "prepared-again": 3} {
		r := small(uid, "boot-1")
		r.Arrived = arrived
		mustSave(t, s, r)
		mustBury(t, s, uid, 2)
	}
	mustBury(t, s, "young", 3)
	if err := os.WriteFile(filepath.Join(dir, "released", "cut-off"), []byte("cut of"), 0o600); err != nil {
		t.Fatal(err)
	}
	files.parts = []string{"/released/"}
	mustBury(t, s, "unwritten-old", 0)
	mustBury(t, s, "unwritten-young", 3)
	taken := map[types.UID]int{}
	tryClaim := func(uid types.UID) (func(), error) {
		if uid == "busy" {
			return nil, nil
		}
		taken[uid]++
		return func() { taken[uid]-- }, nil
	}
	if err := s.SweepTombstones(tombstoneLife+2, tryClaim); err != nil {
		t.Fatal(err)
	}
	for uid, want := range map[types.UID]bool{
		"old": false, "busy": true, "releasing": true, "prepared-again": false, "young": true, "cut-off": false, "unwritten-old": false, "unwritten-young": true,
	} {
		stone, err := s.tombstones.read(uid)
		if err != nil || (stone != nil) != want {
			t.Errorf("%s: left %v, want %v (%v)", uid, stone != nil, want, err)
		}
	}
	for uid, n := range taken {
		if n != 0 {
			t.Errorf("the lock of claim %s is not released", uid)
		}
	}
	if len(taken) == 0 {
		t.Error("no lock was taken")
	}
	if _, tried := taken["young"]; tried {
		t.Error("a lock was taken for a tombstone that stays")
	}
}

// TestSweepReadsTombstonesOnce: of a claim that was released in the last minutes a sweep needs no file
// that it has read before.
func TestSweepReadsTombstonesOnce(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir, "boot-1", OS{})
	noLock := func(types.UID) (func(), error) { return func() {}, nil }
	path := filepath.Join(dir, "released", "u1")
	sweep := func(now time.Duration, left bool) {
		t.Helper()
		if err := s.SweepTombstones(now, noLock); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); (err == nil) != left {
			t.Errorf("after a sweep at %s: %v, left %v", now, err, left)
		}
	}
	mustBury(t, s, "u1", 1)
	sweep(2, true)
	// Whoever reads it removes it.
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	sweep(tombstoneLife, true)
	// A later release, which another process has noted, counts when it would be old.
	mustBury(t, mustOpen(t, dir, "boot-1", OS{}), "u1", 3)
	sweep(1+tombstoneLife, true)
	sweep(2+tombstoneLife, true)
	sweep(3+tombstoneLife, false)
	if known := len(s.tombstones.young); known != 0 {
		t.Errorf("%d are remembered that are gone", known)
	}
}
