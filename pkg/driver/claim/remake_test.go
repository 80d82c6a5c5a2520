// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// losses are what somebody else removes of the partition at addressA0.
var losses = map[string]func(b *box){
	"all of it": func(b *box) { b.removeForeign(addressA0) },
	"compute instance": func(b *box) {
		b.change(addressA0, func(i *gpu.Instance) {
			delete(b.exclusive, i.Compute[0].UUID)
			i.Compute = nil
		})
	},
}

// A partition is made again, and its session is started again. Wherever the call stops, the next release leaves nothing.
func TestStoppedWhileMadeAgain(t *testing.T) {
	for lossName, lose := range losses {
		for name, test := range map[string]struct {
			device string
			stop   func(b *box)
		}{
			"killed": {sliceA0, func(b *box) { b.hooks(nil, b.killAt("create compute instance")) }},
			"killed in the second attempt": {sliceA0, func(b *box) {
				// The first one cannot write down what it is about to do.
				b.hooks(failOnceAt("write prepared", gpu.ErrTimeout), b.killAt("create compute instance"))
			}},
			"no session": {mpsSliceA0, func(b *box) { b.hooks(failOnceAt("start session", errFault), nil) }},
			"panic": {mpsSliceA0, func(b *box) {
				b.hooks(func(effect string) error {
					if effect == "start session" {
						panic("a defect")
					}
					return nil
				}, nil)
			}},
		} {
			runInBubble(t, name+", "+lossName, func(t *testing.T) {
				b := newBox(t)
				claim := newClaim("u1", test.device)
				m := b.manager()
				mustPrepare(t, m, claim)
				lose(b)
				b.mu.Lock()
				delete(b.sessions, sliceA0)
				b.mu.Unlock()
				test.stop(b)
				wantStopped(t, m, claim)
				b.hooks(nil, nil)
				mustUnprepare(t, b.manager(), "u1")
				b.wantNothing()
			})
		}
	}
}

// A process is killed while it prepares a claim on two GPUs and has written down what it has
// made on one. The same holds for the next one, which goes on with the claim.
func TestKilledWhileMadeAgainForHalfAClaim(t *testing.T) {
	for name, lose := range losses {
		runInBubble(t, name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("beside", sliceB0))
			claim := newClaim("u1", sliceA0, sliceB0)
			done := make(chan error)
			go func() { done <- runPrepare(t.Context(), m, claim) }()
			synctest.Wait() // for the second GPU
			b.hooks(nil, b.killAt("mark preparing"))
			mustUnprepare(t, b.manager(), "beside")
			if err := <-done; !errors.Is(err, errKilled) {
				t.Fatalf("not killed: %v", err)
			}
			b.hooks(nil, nil)
			m = b.manager()
			live, _ := b.look(addressA0)
			r, err := m.store.Read("u1")
			if err != nil || r == nil || r.State != record.Preparing || r.Devices[0].Mark != record.Started || live.UUID == "" {
				t.Fatalf("got %+v, %v", r, err)
			}

			lose(b)
			b.hooks(nil, func(string) error {
				if _, found := b.look(addressA0); found {
					return b.die()
				}
				return nil
			})
			if err := runPrepare(t.Context(), m, claim); !errors.Is(err, errKilled) {
				t.Errorf("not killed: %v", err)
			}
			b.hooks(nil, nil)
			mustUnprepare(t, b.manager(), "u1")
			b.wantNothing()
		})
	}
}

// wantStopped prepares a claim, which fails or panics.
func wantStopped(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) {
	t.Helper()
	defer func() { _ = recover() }()
	if err := runPrepare(t.Context(), m, claim); err == nil {
		t.Error("it was not stopped")
	}
}

// failOnceAt makes a hook that fails at the first effect of this name.
func failOnceAt(effect string, err error) func(string) error {
	strike := at(1, func() error { return err })
	return func(e string) error {
		if e != effect {
			return nil
		}
		return strike(e)
	}
}
