// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
)

// TestMain keeps what is logged about damaged files off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// fullDisk refuses what needs space, for paths that contain one of the parts.
type fullDisk struct {
	OS
	parts []string
}

func (f *fullDisk) full(path string) error {
	for _, part := range f.parts {
		if strings.Contains(path, part) {
			return &fs.PathError{Op: "write", Path: path, Err: unix.ENOSPC}
		}
	}
	return nil
}

func (f *fullDisk) Replace(path string, data []byte, mode fs.FileMode) error {
	if err := f.full(path); err != nil {
		return err
	}
	return f.OS.Replace(path, data, mode)
}

// Write leaves an empty file, as the file systems do.
func (f *fullDisk) Write(path string, data []byte, mode fs.FileMode) error {
	if err := f.full(path); err != nil {
		return errors.Join(err, f.OS.Write(path, nil, mode))
	}
	return f.OS.Write(path, data, mode)
}

func mustOpen(t *testing.T, dir, boot string, files Files) *Store {
	t.Helper()
	s, err := Open(t.Context(), dir, boot, files)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// small returns a record of one partition.
func small(uid types.UID, boot string) *Record {
	r := New(Ref{Namespace: "default", Name: "claim-" + string(uid), UID: uid}, boot)
	r.Add(Device{
		Requests: []string{"r0"}, Pool: claimtest.PoolName, Device: claimtest.SliceA0, Type: device.Partition, PCIAddress: claimtest.PCIA,
		Partition: &Partition{Profile: "1g.10gb", ProfileID: 19},
	})
	return r
}

func mustSave(t *testing.T, s *Store, r *Record) {
	t.Helper()
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
}

func damage(t *testing.T, s *Store, uid types.UID) {
	t.Helper()
	if err := os.WriteFile(s.Path(uid), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestOpenSetsDamagedRecordsAside shows which files another boot leaves behind.
func TestOpenSetsDamagedRecordsAside(t *testing.T) {
	const otherVersion = `{"apiVersion":"journal.partage.dev/v3","kind":"ClaimRecord","claim":{"uid":"newer"}}`
	for name, test := range map[string]struct {
		boots []string // of the later starts
		aside string   // the boot to which damaged records were moved, or nothing
	}{
		"same boot":                 {boots: []string{"boot-1", "boot-1"}},
		"next boot":                 {boots: []string{"boot-2"}, aside: "boot-1"},
		"next boot, twice":          {boots: []string{"boot-2", "boot-2"}, aside: "boot-1"},
		"next boot after a restart": {boots: []string{"boot-1", "boot-2"}, aside: "boot-1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := mustOpen(t, dir, "boot-1", OS{})
			mustSave(t, s, small("whole", "boot-1"))
			damage(t, s, "bad")
			if err := os.WriteFile(s.Path("newer"), []byte(otherVersion), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, boot := range test.boots {
				s = mustOpen(t, dir, boot, OS{})
			}
			want, quarantined := []types.UID{"bad", "newer", "whole"}, 0
			if test.aside != "" {
				want, quarantined = []types.UID{"newer", "whole"}, 1
			}
			if got, err := s.UIDs(); err != nil || !cmp.Equal(want, got) {
				t.Errorf("records: got %v, want %v (%v)", got, want, err)
			}
			files, err := filepath.Glob(filepath.Join(dir, "quarantine", "*", "*"))
			if err != nil || len(files) != quarantined {
				t.Fatalf("set aside: %v, %v", files, err)
			}
			if quarantined == 1 && files[0] != filepath.Join(dir, "quarantine", test.aside, "bad.json") {
				t.Errorf("set aside as %s", files[0])
			}
			// What is about another boot stands in nobody's way.
			snapshot, err := s.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			if got := len(snapshot.Unreadable); got != len(want)-1 {
				t.Errorf("unreadable: %+v", snapshot.Unreadable)
			}
		})
	}
}

// TestOpenAfterUnknownBoot shows that nothing is set aside where nobody knows in which
// boot it was written.
func TestOpenAfterUnknownBoot(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir, "boot-1", OS{})
	damage(t, s, "bad")
	if err := os.Remove(filepath.Join(dir, bootName)); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, dir, "boot-2", OS{})
	if got, err := s.UIDs(); err != nil || len(got) != 1 {
		t.Errorf("records: got %v, %v", got, err)
	}
	// From now on the boot is known.
	s = mustOpen(t, dir, "boot-3", OS{})
	if got, err := s.UIDs(); err != nil || len(got) != 0 {
		t.Errorf("records of a known boot: got %v, %v", got, err)
	}
}

// TestOpenOnFullDisk shows that the journal opens, and that a record which is damaged in
// a boot that could not be noted is not taken for one of an earlier boot.
func TestOpenOnFullDisk(t *testing.T) {
	dir := t.TempDir()
	mustOpen(t, dir, "boot-1", OS{})
	s := mustOpen(t, dir, "boot-2", &fullDisk{parts: []string{"/" + bootName}})
	damage(t, s, "bad")
	s = mustOpen(t, dir, "boot-2", OS{})
	if got, err := s.UIDs(); err != nil || len(got) != 1 {
		t.Errorf("records of this boot: got %v, %v", got, err)
	}
}

func TestUIDs(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir, "boot-1", OS{})
	for _, name := range []string{"b.json", ".b.json.tmp", ".a.json.tmp", "c.json.corrupt-1", "README", "d.txt", ".json"} {
		if err := os.WriteFile(filepath.Join(dir, "claims", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.UIDs()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]types.UID{"a", "b"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestCheckUID(t *testing.T) {
	for uid, ok := range map[types.UID]bool{
		"6f4b2a5e-6c0f-4c63-9f5a-0b1f8a1f2c3d": true, "u1": true,
		"": false, "-u": false, ".": false, "..": false, "../x": false, "a/b": false, "a b": false, "a\x00": false,
		types.UID(strings.Repeat("a", 63)): true, types.UID(strings.Repeat("a", 64)): false,
	} {
		if err := CheckUID(uid); (err == nil) != ok {
			t.Errorf("%q: got %v", uid, err)
		}
	}
}

// TestLoadQuarantines shows that a damaged record is reported once, never replaces an
// earlier one in the quarantine, and is dropped on demand.
func TestLoadQuarantines(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir, "boot-1", OS{})
	changed := s.Changed()
	for n, want := range []string{"u1.json", "u1.json-2", "u1.json-3"} {
		damage(t, s, "u1")
		_, err := s.Load(t.Context(), "u1")
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || corrupt.UID != "u1" || corrupt.Path != filepath.Join(dir, "quarantine", "boot-1", want) {
			t.Errorf("got %v, want it in %s", err, want)
		}
		if r, err := s.Load(t.Context(), "u1"); r != nil || err != nil {
			t.Errorf("loaded again: %v, %v", r, err)
		}
		if files, err := s.Quarantined("u1"); err != nil || len(files) != n+1 {
			t.Errorf("in quarantine: %v, %v", files, err)
		}
	}
	damage(t, s, "u11") // another claim, whose UID begins the same
	if _, err := s.Load(t.Context(), "u11"); err == nil {
		t.Error("a damaged record was loaded")
	}
	if err := s.DropQuarantined("u1"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	default:
		t.Error("those who wait for a change were not woken")
	}
	for uid, want := range map[types.UID]int{"u1": 0, "u11": 1} {
		if files, err := s.Quarantined(uid); err != nil || len(files) != want {
			t.Errorf("claim %s: %v, %v", uid, files, err)
		}
	}
	// In the next boot it is about nothing.
	s = mustOpen(t, dir, "boot-2", OS{})
	if files, err := s.Quarantined("u11"); err != nil || len(files) != 0 {
		t.Errorf("in another boot: %v, %v", files, err)
	}
}

// TestLoadKeepsOtherVersions shows that a record of another version stays as it is.
func TestLoadKeepsOtherVersions(t *testing.T) {
	s := mustOpen(t, t.TempDir(), "boot-1", OS{})
	const content = `{"apiVersion":"journal.partage.dev/v3","kind":"ClaimRecord","claim":{"uid":"u1"}}`
	if err := os.WriteFile(s.Path("u1"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := s.Load(t.Context(), "u1")
		var unreadable *UnreadableError
		if !errors.Is(err, ErrOtherVersion) || !errors.As(err, &unreadable) || unreadable.Path != s.Path("u1") {
			t.Errorf("got %v", err)
		}
	}
	if got, err := os.ReadFile(s.Path("u1")); err != nil || string(got) != content {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestSnapshot sorts what is in the journal.
// TestLook: who only looks at the records makes no folder and moves no file.
func TestLook(t *testing.T) {
	dir := t.TempDir()
	all, err := Look(filepath.Join(dir, "absent"), "boot-2")
	if err != nil || len(all.Records) > 0 {
		t.Errorf("got %+v, %v of a folder that is not there", all, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%v was made: %v", entries, err)
	}
	s := mustOpen(t, dir, "boot-1", OS{})
	mustSave(t, s, small("earlier", "boot-1"))
	mustSave(t, s, small("present", "boot-2"))
	mustSave(t, s, small("damaged", "boot-1"))
	damage(t, s, "damaged")
	all, err = Look(dir, "boot-2")
	if err != nil || len(all.Records) != 1 || all.Records[0].Claim.UID != "present" || len(all.Earlier) != 1 || len(all.Unreadable) != 1 {
		t.Errorf("got %+v, %v", all, err)
	}
	if _, err := os.Stat(s.Path("damaged")); err != nil {
		t.Errorf("the damaged record was moved: %v", err)
	}
}

func TestSnapshot(t *testing.T) {
	s := mustOpen(t, t.TempDir(), "boot-2", OS{})
	now, earlier, releasing := small("now", "boot-2"), small("earlier", "boot-1"), small("releasing", "boot-2")
	releasing.State = Unpreparing
	for _, r := range []*Record{now, earlier, releasing} {
		mustSave(t, s, r)
	}
	damage(t, s, "aside")
	if _, err := s.Load(t.Context(), "aside"); err == nil {
		t.Fatal("a damaged record was loaded")
	}
	damage(t, s, "bad")
	snapshot, err := s.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	uids := func(records []*Record) (uids []types.UID) {
		for _, r := range records {
			uids = append(uids, r.Claim.UID)
		}
		return uids
	}
	var unreadable []types.UID
	for _, one := range snapshot.Unreadable {
		unreadable = append(unreadable, one.Claim)
	}
	for name, test := range map[string]struct{ got, want []types.UID }{
		"this boot":     {uids(snapshot.Records), []types.UID{"now", "releasing"}},
		"other boots":   {uids(snapshot.Earlier), []types.UID{"earlier"}},
		"unreadable":    {unreadable, []types.UID{"aside", "bad"}},
		"holders":       {uids(snapshot.Holders()), []types.UID{"now"}},
		"without a one": {uids(snapshot.Others("now").Records), []types.UID{"releasing"}},
	} {
		if diff := cmp.Diff(test.want, test.got); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
	if got := len(snapshot.On(claimtest.PCIA)); got != 2 {
		t.Errorf("%d devices on the GPU", got)
	}
	if got := len(snapshot.On(claimtest.PCIB)); got != 0 {
		t.Errorf("%d devices on another GPU", got)
	}
}
