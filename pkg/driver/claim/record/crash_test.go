// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"os"
	"testing"
	"time"
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
		must(t, step.do(s))
		if step.name == "sweep" {
			must(t, step.do(other)) // each forgets for itself
		}
		for process, s := range map[string]*Store{"this": s, "another": other, "a new": open(t, dir, OS{})} {
			if got := view(s); got != step.want {
				t.Errorf("%s: %s process sees %q, want %q", step.name, process, got, step.want)
			}
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
					must(t, earlier.do(open(t, dir, OS{})))
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
				if got := view(s); got != step.want {
					t.Errorf("%s, killed at call %d (%d): repeated: %q, want %q", step.name, call, after, got, step.want)
				}
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
				must(t, earlier.do(open(t, dir, OS{})))
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
			if got := view(s); got != mine {
				t.Errorf("%s disk: %s: %q, want %q", name, step.name, got, mine)
			}
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
			must(t, s.Sweep(9))
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
	must(t, s.Put(pair(1), started))
	must(t, release(3)(s))
	files.strike = func(int, bool) error { return os.ErrPermission }
	if err := cleared(s, pciA); !errors.Is(err, os.ErrPermission) {
		t.Errorf("got %v", err)
	}
	for process, s := range map[string]*Store{"this": s, "the other": other} {
		if got, want := view(s), "releasing 1 ++; released 3"; got != want {
			t.Errorf("%s process sees %q, want %q", process, got, want)
		}
	}
}

// TestLockRefused checks that a release counts in this process although nothing can be locked.
func TestLockRefused(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/records", nil, 0o600))
	s := open(t, dir, OS{})
	for _, arrived := range []time.Duration{3, 2} {
		if err := release(arrived)(s); err == nil {
			t.Error("written into a file")
		}
	}
	if got, want := view(s), "guard; released 3"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	must(t, os.Remove(dir+"/records"))
	must(t, release(1)(s))
	if got, want := view(open(t, dir, OS{})), "released 3"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
