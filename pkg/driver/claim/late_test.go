// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"sync"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
)

// TestLateRelease: a release that has arrived before the last Prepare of the claim, and gets its turn only then, is of an
// earlier pod.
func TestLateRelease(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	late := arrivedAt(t.Context(), b.clock())
	b.pass(time.Second)
	mustPrepare(t, m, newClaim("u1", sliceA0)) // for the next pod
	err := m.Unprepare(late, "u1")
	if b.spec("u1") == nil || b.count(pciA) == 0 {
		t.Errorf("a release from before the last Prepare took the claim's devices away: %v", err)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// TestPrepareFromBeforeSuspend: a machine is suspended while a Prepare waits for the API server, and its claim was released
// before. Whatever the kubelet has given up long ago does not prepare anything.
func TestPrepareFromBeforeSuspend(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	late := arrivedAt(t.Context(), b.clock())
	mustUnprepare(t, m, "u1")
	b.pass(time.Hour)
	mustReconcile(t, m)
	if _, err := m.Prepare(late, newClaim("u1", sliceA0)); err == nil {
		t.Error("a call from before the release was let through after an hour")
	}
	b.wantNothing()
}

// TestOldRoundBesideYoungerRecord: a round writes the spec of a prepared claim again. Before it says so the record is damaged, and
// the claim, which was allocated anew, is being prepared on another GPU, in the same process or in another one. What the
// round has seen is not true of the younger record.
func TestOldRoundBesideYoungerRecord(t *testing.T) {
	for name, same := range map[string]bool{"the same process": true, "another process": false} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m, next := b.manager(), b.manager()
			if same {
				next = m
			}
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.mu.Lock()
			b.specs["u1"] = nil // as after an upgrade of NVIDIA's driver
			b.mu.Unlock()
			b.pass(time.Second)
			var once sync.Once
			creates, goOn, prepared := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			b.hooks(func(e string) error {
				switch e {
				case "write spec":
					once.Do(func() {
						write(t, m.store.Path("u1"), "{")
						go func() {
							_, err := next.Prepare(t.Context(), newClaim("u1", sliceB0))
							prepared <- err
						}()
						<-creates
					})
				case "create instance":
					close(creates)
					<-goOn
				}
				return nil
			}, nil)
			t.Log(m.cleanUpGPU(t.Context(), pciA))
			if r, err := m.store.Read("u1"); err != nil || r.State != record.Preparing || r.Devices[0].Device != sliceB0 {
				t.Errorf("while the partition is being made: %+v, %v", r, err)
			}
			close(goOn)
			if err := <-prepared; err != nil {
				t.Error(err)
			}
			if got := b.spec("u1"); len(got) != 1 || got[0].Name != sliceB0 {
				t.Errorf("the spec is %+v", got)
			}
		})
	}
}

// TestReleaseOvertakesRound: a claim is released while a round writes its spec again. Neither the spec nor the round's failure to
// say that the claim is prepared is left.
func TestReleaseOvertakesRound(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.mu.Lock()
	b.specs["u1"] = nil // as after an upgrade of NVIDIA's driver
	b.mu.Unlock()
	var begins, goes sync.Once
	gone, released := make(chan struct{}), make(chan error, 1)
	b.hooks(func(e string) error {
		if e == "write spec" {
			begins.Do(func() {
				go func() { released <- m.Unprepare(t.Context(), "u1") }()
				<-gone
			})
		}
		return nil
	}, func(e string) error {
		if e == "remove spec" {
			goes.Do(func() { close(gone) })
		}
		return nil
	})
	if err := m.cleanUpGPU(t.Context(), pciA); err != nil {
		t.Errorf("something is left: %v", err)
	}
	if err := <-released; err != nil {
		t.Error(err)
	}
	b.wantNothing()
}
