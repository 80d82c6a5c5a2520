// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

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
		must(t, put(s, pair(1)))
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
		wantNoAnswer(t, "release", 0, func() error {
			written, err := s.Release(uid, 5)
			if written {
				t.Error("the release is said to be written")
			}
			return err
		})
		if all := s.Snapshot(); all.Err == nil || len(all.Guards) != 1 || all.Guards[0].GPUs != nil {
			t.Errorf("got %+v, want a guard of all GPUs", all)
		}
		if !s.Released(uid, 4) || s.Released(uid, 5) {
			t.Error("it is not known when the claim was released")
		}

		files.thaw()
		synctest.Wait()
		const want = "releasing 1 -- made; released 5"
		if got := view(s); got != want {
			t.Errorf("when the disk answers again: got %q, want %q", got, want)
		}
		must(t, s.Sweep(6))
		if got := view(open(t, dir, OS{})); got != want {
			t.Errorf("to another process after a sweep: got %q, want %q", got, want)
		}
	})
}
