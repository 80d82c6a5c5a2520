// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
)

// TestTwoProcesses prepares and releases claims at the same time in two processes, as during an upgrade, where effects fail
// now and then, while both converge all GPUs. Whatever the order, claims get what they want or an error, no two have the
// same place, and nothing is left.
func TestTwoProcesses(t *testing.T) {
	m := newMachine(t)
	engines := []*Engine{m.engine(), m.engine()}
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(1, 2))
	m.mu.Lock()
	m.fail = func(string) error {
		mu.Lock()
		defer mu.Unlock()
		if random.IntN(40) == 0 {
			return errors.New("it fails now and then")
		}
		return nil
	}
	m.mu.Unlock()
	wants := [][]string{
		{"A slice0"}, {"A slice4", "B slice0"}, {"B slice4"}, {"A slice4"}, {"B mps"}, {"B half"}, {"A turns"}, {"A own", "B own"},
		{"A look"}, {"A look", "B look"}, {"B slice0", "A look"},
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	prepared := make([]int, len(wants))
	for i, devices := range wants {
		e, uid := engines[i%2], types.UID(fmt.Sprintf("u%d", i))
		wg.Go(func() {
			for range 3 {
				// A claim that is in the way does not go before its own round is over.
				limited, cancel := context.WithTimeout(ctx, time.Second)
				unlock, err := e.Locks.Claim(limited, uid)
				if err != nil {
					t.Error(err)
				} else {
					if _, err := e.Prepare(limited, wanted(e, uid, devices...)); err == nil {
						prepared[i]++
						if r, err := e.Store.Read(uid); err != nil || r == nil || r.State != record.Prepared || !m.hasSpec(uid) {
							t.Errorf("claim of %v is prepared, and its record is %+v, %v; CDI spec: %t", devices, r, err, m.hasSpec(uid))
						}
					}
					unlock()
				}
				cancel()
				_ = release(t, e, uid) // what fails is left to the loops
			}
		})
	}
	loops, stop := context.WithCancel(ctx)
	var looping sync.WaitGroup
	for i, e := range engines {
		looping.Go(func() {
			for loops.Err() == nil {
				_, _ = e.Converge(loops, []string{pciA, pciB}[i], everything)
				_, _ = e.Converge(loops, []string{pciB, pciA}[i], everything)
			}
		})
	}
	wg.Wait()
	stop()
	looping.Wait()
	m.heal()
	for _, e := range engines {
		for _, address := range []string{pciA, pciB} {
			if said, err := e.Converge(t.Context(), address, everything); err != nil || said == nil {
				t.Errorf("GPU %s: busy %t, %v", address, said == nil, err)
			} else if len(said.Tasks) > 0 {
				t.Errorf("GPU %s: left to do: %+v", address, said.Tasks)
			}
		}
	}
	// That a mode cannot be turned off keeps no claim: the next one of the whole GPU turns it off.
	clear(m.modes)
	wantLeft(t, m, "at the end", nil)
	for i, devices := range wants {
		e, uid := engines[i%2], types.UID(fmt.Sprintf("u%d", i))
		if _, err := e.Prepare(t.Context(), wanted(e, uid, devices...)); err != nil {
			t.Errorf("afterwards: claim of %v: %v", devices, err)
		}
		if err := release(t, e, uid); err != nil {
			t.Errorf("afterwards: claim of %v: %v", devices, err)
		}
	}
	wantLeft(t, m, "afterwards", nil)
	t.Logf("prepared %v", prepared)
}

// TestNotLeftOver: a claim that only observes a GPU is prepared without its lock. What was seen of it may be over by then, and
// is not taken for what is left of it.
func TestNotLeftOver(t *testing.T) {
	for name, leave := range map[string]func(*Engine){
		"being prepared": func(*Engine) {},
		"being released": func(e *Engine) { _, _ = e.Store.Release("u", e.Clock()) },
	} {
		t.Run(name, func(t *testing.T) { notLeftOver(t, leave) })
	}
}

func notLeftOver(t *testing.T, leave func(*Engine)) {
	t.Helper()
	m := newMachine(t)
	killed, one, other := m.engine(), m.engine(), m.engine()
	m.strike(3, true) // before the claim is noted as prepared
	if _, err := killed.Prepare(t.Context(), wanted(killed, "u", "A look", "B look")); err == nil {
		t.Fatal("the process was not killed")
	}
	m.heal()
	leave(one)
	prepare := func() {
		unlock, err := one.Locks.Claim(t.Context(), "u")
		if err != nil {
			t.Error(err)
			return
		}
		defer unlock()
		if _, err := one.Prepare(t.Context(), wanted(one, "u", "A look", "B look")); err != nil {
			t.Error(err)
		}
	}
	other.Users = hooked{hardware{m}, sync.OnceFunc(prepare)}
	if _, err := other.Converge(t.Context(), pciA, everything); err != nil {
		t.Error(err)
	}
	settle(t, other)
	wantLeft(t, m, "prepared while another process had observed what was left", []string{"record of u", "spec of u"})
}

// hooked does something when it was already read what records say.
type hooked struct {
	hardware

	hook func()
}

func (h hooked) Users(ctx context.Context, pciAddress string, claims []*record.Record, orphan *record.Record) (string, map[int]string, string) {
	h.hook()
	return h.hardware.Users(ctx, pciAddress, claims, orphan)
}

// TestUsersOf shows who is found on the devices of a claim, as if it did not exist.
func TestUsersOf(t *testing.T) {
	for _, devices := range [][]string{{"A slice0"}, {"A whole"}, {"A mps"}, {"A own", "B own"}} {
		m := newMachine(t)
		e := m.engine()
		r, err := e.Prepare(t.Context(), wanted(e, "u", devices...))
		if err != nil {
			t.Fatal(err)
		}
		for _, users := range []string{"process 4711", ""} {
			m.users[pciA] = users
			got, err := e.UsersOf(t.Context(), r, pciA)
			want := ""
			if users != "" && devices[0] != "A slice0" { // the users of partitions are found by instance
				want = r.Devices[0].Device + ": " + users
			}
			if got != want || err != nil {
				t.Errorf("%v, users %q: got %q, %v", devices, users, got, err)
			}
		}
	}
}

// TestFinishUnreadable: a release that waits is not over because the record cannot be read.
func TestFinishUnreadable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t)
		e := m.engine()
		if _, err := e.Prepare(t.Context(), wanted(e, "u", "A")); err != nil {
			t.Fatal(err)
		}
		m.users[pciA] = "process 4711"
		known, err := e.Store.Release("u", m.clock())
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.Join(m.root, "records")
		e.Users = hooked{hardware{m}, func() {
			_ = os.Rename(folder, folder+"-aside")
			_ = os.WriteFile(folder, nil, 0o600)
		}}
		if err = e.Finish(t.Context(), known.Of("u"), []string{pciA}); err == nil {
			t.Errorf("something is left, and it is said that nothing is: %v", m.left())
		}
	})
}
