// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// makeSlow lets each call on GPU A take this long, in the time of a bubble.
func (b *box) makeSlow(each time.Duration) {
	b.slow.mu.Lock()
	defer b.slow.mu.Unlock()
	b.slow.gpus = map[string]time.Duration{pciA: each}
}

// TestSlowGPUHoldsUpNobody: one GPU is slow, so that calls for its claims are at work on it for minutes, and the driver looks
// at all GPUs as ever. Claims of another one do not wait.
func TestSlowGPUHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		b.makeSlow(20 * time.Second)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		repeat := func(do func()) {
			wg.Go(func() {
				for ctx.Err() == nil {
					do()
				}
			})
		}
		repeat(func() {
			_, _ = m.Prepare(ctx, newClaim("slow", sliceA0))
			_ = m.Unprepare(ctx, "slow")
		})
		repeat(func() {
			survey(ctx, m)
			time.Sleep(10 * time.Second)
			b.pass(10 * time.Second)
		})
		time.Sleep(time.Minute)
		var longest time.Duration
		for range 60 {
			began := time.Now()
			mustPrepare(t, m, newClaim("beside", sliceB0))
			mustUnprepare(t, m, "beside")
			longest = max(longest, time.Since(began))
			time.Sleep(time.Second)
		}
		if longest > time.Second {
			t.Errorf("GPU A is slow, and a claim of GPU B waits for %s", longest)
		}
		stop()
		wg.Wait()
	})
}

// TestReleaseOnSlowGPU: each call takes its time and none hangs. The kubelet gets an answer, so that the pod ends, and the
// release comes to its end although no run of it has the time to do all of it.
func TestReleaseOnSlowGPU(t *testing.T) {
	for name, check := range map[string]func(t *testing.T, b *box, m *Manager){
		"is answered": func(t *testing.T, _ *box, m *Manager) {
			ctx, cancel := context.WithTimeout(t.Context(), kubeletTime)
			defer cancel()
			began := time.Now()
			if err := m.Unprepare(ctx, "u1"); err != nil || time.Since(began) > 20*time.Second {
				t.Errorf("the kubelet waits for %s for the end of a pod: %v", time.Since(began), err)
			}
		},
		"comes to its end": func(t *testing.T, b *box, m *Manager) {
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), kubeletTime)
				_ = m.Unprepare(ctx, "u1")
				cancel()
				_ = m.cleanUp(t.Context())
				time.Sleep(time.Minute)
				b.pass(2 * time.Minute)
			}
			if left := b.state(); len(left) > 0 {
				t.Errorf("after half an hour a release has not got on: %q", left)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
				// To read what is on a GPU with seven partitions takes 36 calls of NVML. Here each takes 1.3 s.
				b.makeSlow(36 * 1300 * time.Millisecond)
				b.slow.each = 1300 * time.Millisecond
				check(t, b, m)
				b.slow.nothing()
				time.Sleep(gpuTime) // what goes on without a caller ends
			})
		})
	}
}

// TestSlowReleaseIsTainted: the record of a claim says that it is being released long before anybody has looked at its GPU. What a
// release is still at work on is not tainted: as a rule it is free before anybody else wants it.
func TestSlowReleaseIsTainted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", sliceA0))
		mustReconcile(t, m)
		b.makeSlow(20 * time.Second)
		began := time.Now()
		released := make(chan error)
		go func() { released <- m.Unprepare(t.Context(), "u1") }()
		time.Sleep(5 * time.Second)
		b.pass(5 * time.Second)
		if got := findings(survey(t.Context(), m)); len(got) > 0 {
			t.Errorf("while it is released: %q", got)
		}
		if err := <-released; err != nil {
			t.Fatal(err)
		}
		b.pass(time.Since(began) - 5*time.Second)
		for len(findings(survey(t.Context(), m))) == 0 && time.Since(began) < 10*time.Minute {
			time.Sleep(time.Second)
			b.pass(time.Second)
		}
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("what is being released is tainted after %s", took)
		}
		b.slow.nothing()
		time.Sleep(gpuTime) // what goes on without a caller ends
		mustReconcile(t, m)
		if got := findings(survey(t.Context(), m)); len(got) > 0 {
			t.Errorf("after the release: %q", got)
		}
		b.wantNothing()
	})
}

// TestSlowGPUTaintsNoOther: what is released of another GPU while a look waits for the slow one is free.
func TestSlowGPUTaintsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		for range 10 { // it was by chance
			mustPrepare(t, m, newClaim("u1", sliceB0))
			b.hooks(func(effect string) error {
				if effect == "destroy instance" {
					return errors.New("not now")
				}
				return nil
			}, nil)
			mustUnprepare(t, m, "u1")
			b.hooks(nil, nil)
			b.pass(time.Minute)
			b.makeSlow(20 * time.Second)
			if status, err := m.Reconcile(t.Context()); err != nil || len(findings(status)) > 0 {
				t.Errorf("GPU A is slow, GPU B is not: %q, %v", findings(status), err)
			}
			b.slow.nothing()
			time.Sleep(gpuTime) // what goes on without a caller ends
		}
		b.wantNothing()
	})
}

// TestSlowReleaseOfShare: the rest of a device that claims share may be given out, also while a share is released.
func TestSlowReleaseOfShare(t *testing.T) {
	for _, stays := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("goes", mpsA))
			if stays {
				mustPrepare(t, m, newClaim("stays", mpsA))
			}
			mustReconcile(t, m)
			b.makeSlow(20 * time.Second)
			mustUnprepare(t, m, "goes")
			b.pass(time.Minute)
			if got := findings(survey(t.Context(), m)); (len(got) == 0) != stays {
				t.Errorf("another claim has a share: %t; %q", stays, got)
			}
			b.slow.nothing()
			time.Sleep(gpuTime) // what goes on without a caller ends
		})
	}
}
