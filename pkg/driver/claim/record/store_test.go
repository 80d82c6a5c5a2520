// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestTwoProcesses checks that no change of two processes at work on one claim is lost, and that nobody reads half of one.
func TestTwoProcesses(t *testing.T) {
	const each = 50
	dir := t.TempDir()
	stores := []*Store{open(t, dir, OS{}), open(t, dir, OS{})}
	must.Do(t, put(stores[0], example()))
	var writers, readers sync.WaitGroup
	var done atomic.Bool
	for _, s := range stores {
		for _, change := range []func(*Record) error{
			func(r *Record) error { r.Arrived++; return nil },           // in place
			func(r *Record) error { r.Sessions[0].Kills++; return nil }, // replaced
		} {
			writers.Go(func() {
				for range each {
					if err := s.Update(uid, change); err != nil {
						t.Error(err)
					}
				}
			})
		}
		readers.Go(func() {
			for !done.Load() {
				if all := s.Snapshot(); len(all.Records) != 1 || len(all.Guards) > 0 {
					t.Errorf("read %+v", all)
				}
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
	want := example()
	want.Arrived += 2 * each
	want.Sessions[0].Kills += 2 * each
	for _, s := range stores {
		got, err := s.Read(uid)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v, -want +got:\n%s", err, diff)
		}
	}
}

// TestReadAtOnce checks that a process reads what another has just written, of the same size and at the same time.
func TestReadAtOnce(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir, OS{}), open(t, dir, OS{})
	for i := range time.Duration(100) {
		r := pair(100 + i)
		r.Claim.Name = fmt.Sprintf("train-%02d", i)
		must.Do(t, put(a, r))
		all := b.Snapshot()
		if len(all.Records) != 1 || all.Records[0].Arrived != r.Arrived || all.Records[0].Claim.Name != r.Claim.Name {
			t.Fatalf("read %+v, want %+v", all.Records, r)
		}
		all.Records[0].Devices[0].Partition.Profile = "changed by its reader"
		if got, err := b.Read(uid); err != nil || got.Devices[0].Partition.Profile != "1g.10gb" {
			t.Fatalf("got %+v, %v", got, err)
		}
	}
	must.Do(t, cleared(a, ""))
	if all := b.Snapshot(); len(all.Records) > 0 {
		t.Errorf("what is gone is read: %+v", all.Records)
	}
}

// TestFolderRemoved checks that the folder of records is made again.
func TestFolderRemoved(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, OS{})
	must.Do(t, put(s, pair(1)))
	must.Do(t, os.RemoveAll(filepath.Dir(s.Path(uid))))
	must.Do(t, s.Put(pair(3), started))
	wantView(t, "saved", "preparing 3 ++", open(t, dir, OS{}))
}

// TestWhatIsNoFile checks what cannot be read although no content is to blame.
func TestWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, OS{})
	must.Do(t, os.MkdirAll(filepath.Join(s.Path(uid), "inside"), 0o755))
	must.Do(t, put(s, &Record{Claim: Ref{UID: "u2"}, BootID: boot, State: Preparing}))
	if got := s.Snapshot(); got.Err != nil || !got.IsGuarded(uid) || got.Of("u2") == nil {
		t.Errorf("got %+v", got)
	}
	_, err := s.Release(uid, 3)
	must.Do(t, err)
	guards := s.Snapshot().Guards
	// What is in it is not known, nor whether that was so when the claim was released.
	if len(guards) != 1 || guards[0].GPUs != nil || guards[0].Released {
		t.Errorf("guards: %+v", guards)
	}
	for n := range 2 {
		must.Do(t, put(s, pair(4+time.Duration(n))))
		path := fmt.Sprintf("%s.%d", s.Path(uid), n+1)
		must.Do(t, os.Remove(path))
		must.Do(t, os.Mkdir(path, 0o755))
	}
	guards = s.Snapshot().Guards
	if len(guards) != 3 {
		t.Errorf("guards: %+v", guards)
	}
	// What cannot be removed stays a guard.
	must.Do(t, put(s, pair(6)))
	if err := s.DropGuards(uid); err == nil {
		t.Error("a folder with something in it is removed")
	}
	if got := s.Snapshot().Guards; len(got) == 0 {
		t.Error("nothing guards it")
	}
}

// TestReleasedSince checks which releases are about which file of a claim.
func TestReleasedSince(t *testing.T) {
	cut := func(s *Store) error { return os.Truncate(s.Path(uid), 30) }
	cutMore := func(s *Store) error { return os.Truncate(s.Path(uid), 20) }
	for name, test := range map[string]struct {
		do   []func(*Store) error
		want string
	}{
		"not released": {[]func(*Store) error{cut}, "guard"},
		"released":     {[]func(*Store) error{cut, release(5)}, "released guard; released 5"},
		// Whatever the release has covered, the claim has a record again.
		"released, then prepared":        {[]func(*Store) error{cut, release(5), save(6)}, "preparing 6 --; guard; released 5"},
		"prepared again":                 {[]func(*Store) error{cut, save(6)}, "preparing 6 --; guard"},
		"prepared again, late release":   {[]func(*Store) error{cut, save(6), release(5)}, "preparing 6 --; guard; released 5"},
		"prepared again, then released":  {[]func(*Store) error{cut, save(6), release(7)}, "releasing 6 --; guard; released 7"},
		"damaged after it was released":  {[]func(*Store) error{release(5), damage}, "guard " + pciA + "," + pciB + "; released 5"},
		"changed after it was released":  {[]func(*Store) error{cut, release(5), cutMore}, "guard; released 5"},
		"changed, then released":         {[]func(*Store) error{cut, release(5), cutMore, release(6)}, "released guard; released 6"},
		"released before it was written": {[]func(*Store) error{release(5), save(6), damage}, "guard " + pciA + "," + pciB + "; released 5"},
		"not dropped":                    {[]func(*Store) error{cut, drop}, "guard"},
		"cleared before it was released": {[]func(*Store) error{cut, clearGuards(pciA, pciB)}, "guard"},
		"cleared on one GPU":             {[]func(*Store) error{cut, release(5), clearGuards(pciA)}, "released guard but " + pciA + "; released 5"},
		"cleared on one, then released":  {[]func(*Store) error{cut, release(5), clearGuards(pciA), release(6)}, "released guard but " + pciA + "; released 6"},
		"cleared on one, then changed":   {[]func(*Store) error{cut, release(5), clearGuards(pciA), cutMore, clearGuards(pciB)}, "guard; released 5"},
		"its GPUs are not known":         {[]func(*Store) error{cut, release(5), clearGuards(pciA, pciB), sweep}, "released guard but " + pciA + "," + pciB + "; released 5"},
		"cleared":                        {[]func(*Store) error{damage, release(5), clearGuards(pciB, pciA)}, "released 5"},
		"cleared and swept":              {[]func(*Store) error{damage, release(5), clearGuards(pciB, pciA), sweep}, ""},
		"never swept":                    {[]func(*Store) error{cut, release(5), sweep}, "released guard; released 5"},
		"not swept beside a file":        {[]func(*Store) error{cut, save(6), release(7), clearAll, sweep}, "released guard; released 7"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, OS{})
			must.Do(t, put(s, pair(2)))
			for _, do := range test.do {
				must.Do(t, do(s))
			}
			wantView(t, "this process", test.want, s)
			// Another process looks at the GPUs itself.
			want := regexp.MustCompile(" but [^;]*").ReplaceAllString(test.want, "")
			wantView(t, "another process", want, open(t, dir, OS{}))
		})
	}
}

func save(arrived time.Duration) func(*Store) error {
	return func(s *Store) error { return put(s, pair(arrived)) }
}
func drop(s *Store) error { return s.DropGuards(uid) }
func clearGuards(gpus ...string) func(*Store) error {
	return func(s *Store) (err error) {
		for _, address := range gpus {
			err = errors.Join(err, s.ClearGuards(uid, address))
		}
		return err
	}
}
func clearAll(s *Store) error { return cleared(s, "") }
func sweep(s *Store) error    { return s.Sweep(9 + life) }

// TestTwoVersions checks what a process makes of a claim's files after one that could not read its record was at work beside it.
func TestTwoVersions(t *testing.T) {
	for name, test := range map[string]struct {
		other func(*Store) error
		want  string
	}{
		"released":       {release(5), "releasing 2 --; released 5"},
		"prepared again": {save(6), "preparing 6 --; guard " + pciA + "," + pciB},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir(), OS{})
			must.Do(t, put(s, pair(2)))
			text, err := os.ReadFile(s.Path(uid))
			must.Do(t, err)
			must.Do(t, os.WriteFile(s.Path(uid), []byte(resum(strings.Replace(string(text), "record/1 ", "record/9 ", 1))), 0o600))
			must.Do(t, test.other(s))
			// This process is of the version that wrote the record.
			must.Do(t, os.WriteFile(s.Path(uid), text, 0o600))
			for range 2 {
				wantView(t, "changed back", test.want, s)
				must.Do(t, s.Sweep(9))
			}
			must.Do(t, s.DropGuards(uid))
			must.Do(t, cleared(s, ""))
			must.Do(t, s.Sweep(9+life))
			must.Do(t, s.Sweep(9+life))
			wantEmpty(t, s)
		})
	}
}

// TestSweep checks when it is forgotten that a claim was released.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, OS{})
	must.Do(t, release(5)(s))
	for now, want := range map[time.Duration]string{4: "released 5", 4 + life: "released 5"} {
		must.Do(t, s.Sweep(now))
		wantView(t, now.String(), want, s)
	}
	must.Do(t, s.Sweep(5+life))
	wantEmpty(t, s)
}

// TestEarlierBoots checks that records of another boot are known until their claims are released, and that nothing else of it is left.
func TestEarlierBoots(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(*Store) error
		want string
	}{
		"nothing":              {func(*Store) error { return nil }, "earlier boot-0 prepared"},
		"swept":                {sweep, "earlier boot-0 prepared"},
		"prepared again":       {save(1), "preparing 1 --"},
		"released":             {release(3), "released 3"},
		"cleared":              {clearAll, ""},
		"released and cleared": {func(s *Store) error { return errors.Join(release(3)(s), cleared(s, pciA)) }, "released 3"},
		"released and swept":   {func(s *Store) error { return errors.Join(release(3)(s), s.Sweep(3+life)) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			before, err := Open(dir, "boot-0", OS{})
			must.Do(t, err)
			r := pair(1)
			r.BootID, r.State = "boot-0", Prepared
			must.Do(t, put(before, r))
			must.Do(t, os.WriteFile(before.Path("u2"), []byte("damaged"), 0o600))
			_, err = before.Release("u3", 5)
			must.Do(t, err)
			s := open(t, dir, OS{})
			must.Do(t, test.do(s))
			wantView(t, name, test.want, s)
			if got, err := s.Read(uid); err != nil || name == "nothing" && (got == nil || got.BootID != "boot-0") {
				t.Errorf("read %+v, %v", got, err)
			}
			must.Do(t, cleared(s, ""))
			must.Do(t, s.Sweep(9+life))
			must.Do(t, s.Sweep(9+life))
			wantEmpty(t, s)
		})
	}
}

// TestOldBuilds checks that the files of builds before this format block everything, in the boot that they are of.
func TestOldBuilds(t *testing.T) {
	for name, test := range map[string]struct{ note, want string }{
		"this boot": {boot + "\n", "guard"}, "earlier boot": {"boot-0\n", ""}, "unknown one": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must.Do(t, os.Mkdir(filepath.Join(dir, "claims"), 0o755))
			path := filepath.Join(dir, "claims", "u1.json")
			must.Do(t, os.WriteFile(path, []byte("{}"), 0o600))
			must.Do(t, os.WriteFile(filepath.Join(dir, "boot"), []byte(test.note), 0o600))
			s := open(t, dir, OS{})
			wantView(t, name, test.want, s)
			must.Do(t, release(3)(s))
			must.Do(t, s.DropGuards(uid))
			all, err := look(dir)
			must.Do(t, err)
			if _, err := os.Stat(path); err != nil || len(all.Guards) > 0 != (test.want != "") {
				t.Errorf("%v, guards %+v", err, all.Guards)
			}
			for _, g := range all.Guards {
				if want := "drain the node, then remove " + filepath.Dir(path); g.Remedy != want {
					t.Errorf("remedy %q, want %q", g.Remedy, want)
				}
			}
		})
	}
}

// look reads all records as a program does that is not the driver.
func look(dir string) (*Snapshot, error) {
	s, err := Open(dir, boot, OS{})
	if err != nil {
		return nil, err
	}
	return s.Snapshot(), nil
}

// TestReadingChangesNothing checks that reading changes nothing.
func TestReadingChangesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "absent")
	all, err := look(dir)
	if err != nil || len(all.Records)+len(all.Guards)+len(all.Earlier) > 0 {
		t.Errorf("got %+v, %v", all, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it made the folder: %v", err)
	}
	must.Do(t, put(open(t, dir, OS{}), example()))
	all, err = look(dir)
	must.Do(t, err)
	expect.Same(t, all.Records, []*Record{example()}, "records")
	for address, want := range map[string]int{pciA: 2, pciB: 2, "0000:5e:00.0": 0} {
		if got := all.On(address); len(got) != want {
			t.Errorf("on %s: got %d devices, want %d", address, len(got), want)
		}
	}
}

// TestSweepUnfinished: what a killed process was about to put in place goes.
func TestSweepUnfinished(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, OS{})
	left := filepath.Join(dir, "records", ".uid.boot-1.tmp")
	must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(left), 0o750), os.WriteFile(left, nil, 0o600), s.Sweep(0)))
	wantEmpty(t, s)
}

// wantEmpty fails unless no file is left.
func wantEmpty(t *testing.T, s *Store) {
	t.Helper()
	if left, err := os.ReadDir(filepath.Dir(s.Path(uid))); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// announced are files that fail when somebody was told of a change before it is written.
type announced struct {
	OS
	told <-chan struct{}
}

func (f *announced) WriteHead(path string, data []byte) error {
	select {
	case <-f.told:
		return errors.New("others know of it already")
	default:
		return f.OS.WriteHead(path, data)
	}
}

// TestReleaseIsWrittenFirst: nobody acts on a release that is not written down. Of two claims that share a partition, whose
// releases come at the same time, one destroys it: the other one, should its process be killed then, must not be found prepared.
func TestReleaseIsWrittenFirst(t *testing.T) {
	files := &announced{}
	s := open(t, t.TempDir(), files)
	must.Do(t, put(s, pair(2)))
	files.told = s.Changed()
	if _, err := s.Release(uid, 5); err != nil {
		t.Errorf("release: %v", err)
	}
	files.told = s.Changed()
	must.Do(t, cleared(s, pciA))
}
