// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/test/must"
)

// TestLife checks what each step of a claim's life leaves, and which steps take no space.
func TestLife(t *testing.T) {
	files := &faulty{}
	dir := t.TempDir()
	s, other := open(t, dir, files), open(t, dir, OS{})
	for _, step := range steps() {
		files.strike = func(_ int, space bool) error {
			if space && step.inPlace {
				t.Errorf("%s: takes space", step.name)
			}
			return nil
		}
		must.Do(t, step.do(s))
		if step.name == "sweep" {
			must.Do(t, step.do(other)) // each forgets for itself
		}
		for process, s := range map[string]*Store{"this": s, "another": other, "a new": open(t, dir, OS{})} {
			wantView(t, step.name+": to "+process+" process", step.want, s)
		}
	}
	if len(s.releases.unwritten()) > 0 {
		t.Errorf("in memory: %v", s.releases.unwritten())
	}
}

// TestKilledAtEveryWrite checks that a process that is killed between any two calls leaves what was there before the
// step or what is there after it, and that the step can be repeated.
func TestKilledAtEveryWrite(t *testing.T) {
	killed := errors.New("killed")
	struck := 0
	for i, step := range steps() {
		for call, reached := 1, true; reached && step.name != "damage"; call++ {
			for _, after := range []int{0, call} {
				dir := t.TempDir()
				for _, earlier := range steps()[:i] {
					must.Do(t, earlier.do(open(t, dir, OS{})))
				}
				before := view(open(t, dir, OS{}))
				files := &faulty{after: after, strike: func(n int, _ bool) error {
					if n < call {
						return nil
					}
					return killed // and all that follows
				}}
				_ = step.do(open(t, dir, files))
				if reached = files.calls >= call; !reached {
					break
				}
				struck++
				s := open(t, dir, OS{})
				if got := view(s); got != before && got != step.want {
					t.Errorf("%s, killed at call %d (%d): left %q, want %q or %q", step.name, call, after, got, before, step.want)
				}
				if err := step.do(s); err != nil && !errors.Is(err, ErrNoRecord) {
					t.Errorf("%s, killed at call %d (%d): repeated: %v", step.name, call, after, err)
				}
				wantView(t, fmt.Sprintf("%s, killed at call %d (%d): repeated", step.name, call, after), step.want, s)
			}
		}
	}
	t.Logf("%d kills", struck)
	if struck < 2*len(steps()) {
		t.Error("not all steps were struck")
	}
}

// TestDiskRefuses checks every step on a disk that is full, read-only or broken. A release is kept in memory and written
// later; everything else fails and changes nothing.
func TestDiskRefuses(t *testing.T) {
	for name, fault := range faults {
		for i, step := range steps() {
			if step.name == "damage" {
				continue
			}
			dir := t.TempDir()
			for _, earlier := range steps()[:i] {
				must.Do(t, earlier.do(open(t, dir, OS{})))
			}
			files := &faulty{}
			s, other := open(t, dir, files), open(t, dir, OS{})
			before := view(s)
			changed := s.Changed()
			files.strike = func(_ int, space bool) error {
				if fault.space && !space {
					return nil
				}
				return fault.err
			}
			err := step.do(s)
			fails := !fault.space || !step.inPlace
			if fails != errors.Is(err, fault.err) {
				t.Errorf("%s disk: %s: got %v", name, step.name, err)
			}
			mine, others := step.want, step.want
			if fails {
				others = before
				if !step.kept {
					mine = before
				}
			}
			wantView(t, name+" disk: "+step.name, mine, s)
			if got := view(other); got != others && step.name != "save over it" {
				t.Errorf("%s disk: %s: another process sees %q, want %q", name, step.name, got, others)
			}
			select {
			case <-changed:
			default:
				if mine != before {
					t.Errorf("%s disk: %s: nobody is woken", name, step.name)
				}
			}
			files.strike = nil
			must.Do(t, s.Sweep(9))
			if got := view(other); got != mine && step.name != "sweep" {
				t.Errorf("%s disk: %s: when it works again: %q, want %q", name, step.name, got, mine)
			}
			if len(s.releases.unwritten()) > 0 {
				t.Errorf("%s disk: %s: in memory: %v", name, step.name, s.releases.unwritten())
			}
		}
	}
}

// TestClearRefused checks that what the disk does not take is not cleared for the process that tried it either: another one
// may count on the record, and do nothing about what it takes for that claim's.
func TestClearRefused(t *testing.T) {
	dir := t.TempDir()
	files := &faulty{}
	s, other := open(t, dir, files), open(t, dir, OS{})
	must.Do(t, s.Put(pair(1), started))
	must.Do(t, release(3)(s))
	files.strike = func(int, bool) error { return os.ErrPermission }
	if err := cleared(s, pciA); !errors.Is(err, os.ErrPermission) {
		t.Errorf("got %v", err)
	}
	for process, s := range map[string]*Store{"this": s, "the other": other} {
		wantView(t, process+" process", "releasing 1 ++; released 3", s)
	}
}

// TestLockRefused checks that a release counts in this process although nothing can be locked.
func TestLockRefused(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(dir+"/records", nil, 0o600))
	s := open(t, dir, OS{})
	for _, arrived := range []time.Duration{3, 2} {
		if err := release(arrived)(s); err == nil {
			t.Error("written into a file")
		}
	}
	wantView(t, "while nothing can be locked", "guard; released 3", s)
	must.Do(t, os.Remove(dir+"/records"))
	must.Do(t, release(1)(s))
	wantView(t, "once it can be locked", "released 3", open(t, dir, OS{}))
}

// held are files of a disk that does not answer writes while it is frozen.
type held struct {
	OS
	frozen chan struct{}
}

func (h *held) thaw() { close(h.frozen); h.frozen = nil }

func (h *held) wait() {
	if h.frozen != nil {
		<-h.frozen
	}
}

func (h *held) Replace(path string, data []byte) error { h.wait(); return h.OS.Replace(path, data) }

func (h *held) WriteHead(path string, data []byte) error { h.wait(); return h.OS.WriteHead(path, data) }

// took returns what an action says, and for how long it was waited.
func took(action func() error) (time.Duration, error) {
	began := time.Now()
	err := action()
	return time.Since(began), err
}

func wantNoAnswer(t *testing.T, what string, within time.Duration, action func() error) {
	t.Helper()
	waited, err := took(action)
	if err == nil || !strings.Contains(err.Error(), "the disk does not answer") {
		t.Errorf("%s: got error %v, want that the disk does not answer", what, err)
	}
	if waited > within {
		t.Errorf("%s: waited for %s, want %s at most", what, waited, within)
	}
}

// TestHungDisk: a write that does not return keeps its caller for a while and all others not at all. What was released meanwhile
// is known, and written when the disk answers again, after what was at work.
func TestHungDisk(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		files := &held{}
		s := open(t, dir, files)
		must.Do(t, put(s, pair(1)))
		files.frozen = make(chan struct{})

		late := make(chan error)
		behind := make(chan struct{})
		go func() { late <- s.Update(uid, prepared) }()
		go func() {
			synctest.Wait() // the first one is at work
			wantNoAnswer(t, "behind the write", 2*diskTime, func() error {
				return s.Update(uid, func(*Record) error { t.Error("a change is made whose caller was told that it was not"); return nil })
			})
			close(behind)
		}()
		wantNoAnswer(t, "the write", 2*diskTime, func() error { return <-late })
		<-behind

		wantNoAnswer(t, "write", 0, func() error { return cleared(s, pciA) })
		wantNoAnswer(t, "read", 0, func() error { _, err := s.Read(uid); return err })
		wantNoAnswer(t, "sweep", 0, func() error { return s.Sweep(1) })
		wantNoAnswer(t, "release", 0, func() error { _, err := s.Release(uid, 5); return err })
		if all := s.Snapshot(); all.Err == nil || len(all.Guards) != 1 || all.Guards[0].GPUs != nil {
			t.Errorf("got %+v, want a guard of all GPUs", all)
		}
		if !s.Released(uid, 4) || s.Released(uid, 5) {
			t.Error("it is not known when the claim was released")
		}

		files.thaw()
		synctest.Wait()
		const want = "releasing 1 -- made; released 5"
		wantView(t, "when the disk answers again", want, s)
		must.Do(t, s.Sweep(6))
		wantView(t, "to another process after a sweep", want, open(t, dir, OS{}))
	})
}

// TestHungRead: the disk hangs while what is there is read. The change is not made later, of which the caller was told that it
// was not; the release is known, and written by a sweep.
func TestHungRead(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), OS{})
	must.Do(t, put(s, pair(1)))
	fifo := s.Path(uid) + ".1"
	must.Do(t, unix.Mkfifo(fifo, 0o600))
	changed := false
	wantNoAnswer(t, "update", 2*diskTime, func() error {
		return s.Update(uid, func(*Record) error { changed = true; return nil })
	})
	wantNoAnswer(t, "release", diskTime, func() error { _, err := s.Release(uid, 5); return err })
	file, err := os.OpenFile(fifo, os.O_WRONLY, 0) // who reads it goes on
	must.Do(t, err)
	must.Do(t, os.Remove(fifo))
	must.Do(t, file.Close())
	for _, err := s.Read(uid); err != nil; _, err = s.Read(uid) {
		if t.Context().Err() != nil {
			t.Fatal(err)
		}
	}
	if changed {
		t.Error("a change was made of which its caller was told that it was not")
	}
	must.Do(t, s.Sweep(6))
	wantView(t, "afterwards", "releasing 1 --; released 5", open(t, filepath.Dir(s.folder), OS{}))
}

// TestPanicInChange: a defect in a change does not keep its caller, who has locks.
func TestPanicInChange(t *testing.T) {
	s := open(t, t.TempDir(), OS{})
	must.Do(t, put(s, pair(1)))
	if err := s.Update(uid, func(*Record) error { panic("a defect") }); err == nil || !strings.Contains(err.Error(), "a defect") {
		t.Errorf("got %v, want the defect", err)
	}
	wantView(t, "after a panic", "preparing 1 --", s)
}

// slow are files that take a second to be removed.
type slow struct{ OS }

func (slow) Remove(path string) error { time.Sleep(time.Second); return OS{}.Remove(path) }

// TestLongSweep: others get their turn while many files are swept on a disk that is slow, and answers.
func TestLongSweep(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := open(t, dir, slow{})
		must.Do(t, put(s, pair(1)))
		for i := range 40 {
			_, err := s.Release(types.UID(fmt.Sprintf("old-%d", i)), 1)
			must.Do(t, err)
		}
		swept := make(chan error, 1)
		go func() { swept <- s.Sweep(2 + life) }()
		time.Sleep(diskTime + time.Second)
		if waited, err := took(func() error { _, err := s.Read(uid); return err }); err != nil || waited > 2*time.Second {
			t.Errorf("a read beside it: %v after %s", err, waited)
		}
		must.Do(t, <-swept)
	})
}

// TestLockedElsewhere: a process that is stopped while it has the lock is waited for once, until it lets go.
func TestLockedElsewhere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, OS{})
	must.Do(t, put(s, pair(1)))
	stopped := flock.New(s.folder, flock.SetFlag(os.O_RDONLY))
	if locked, err := stopped.TryLock(); !locked || err != nil {
		t.Fatal(locked, err)
	}
	for _, most := range []time.Duration{2 * diskTime, diskTime / 2, diskTime / 2} {
		wantNoAnswer(t, "release", most, func() error { _, err := s.Release(uid, 5); return err })
	}
	must.Do(t, stopped.Unlock())
	for _, err := s.Read(uid); err != nil; _, err = s.Read(uid) {
		if t.Context().Err() != nil {
			t.Fatal(err)
		}
	}
	must.Do(t, s.Sweep(6))
	wantView(t, "afterwards", "releasing 1 --; released 5", open(t, dir, OS{}))
}
