// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
)

// A GPU that is slow does not hold up the claims of another, also where a claim has both.
func TestSlowGPUOfAClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		b.beforeEffect(func(pciAddress, effect string) error {
			if pciAddress == pciA && effect == "create instance" {
				time.Sleep(20 * time.Second)
			}
			return nil
		})
		done := make(chan error)
		go func() { _, err := m.Prepare(t.Context(), newClaim("u1", sliceA0, sliceB0)); done <- err }()
		synctest.Wait()
		start := time.Now()
		mustPrepare(t, m, newClaim("u2", wholeB+"-mig-1g10gb-1"))
		mustUnprepare(t, m, "u2")
		if waited := time.Since(start); waited > 0 {
			t.Errorf("a claim on GPU B only has waited %s for GPU A", waited)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		// Nor does it hold up the release of the other part.
		b.beforeEffect(func(pciAddress, effect string) error {
			if pciAddress == pciA && effect == "destroy instance" {
				time.Sleep(20 * time.Second)
			}
			return nil
		})
		go func() { done <- m.Unprepare(t.Context(), "u1") }()
		synctest.Wait()
		start = time.Now()
		mustPrepare(t, m, newClaim("u2", sliceB0))
		mustUnprepare(t, m, "u2")
		if waited := time.Since(start); waited > 0 {
			t.Errorf("the place on GPU B was free, and the next claim has waited %s for GPU A", waited)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		b.beforeEffect(nil)
		mustReconcile(t, m) // what the release had no time for
		b.wantNothing()
	})
}

// A claim on two GPUs gets them although claims on one each come and go without end.
func TestClaimOnTwoGPUsIsNotStarved(t *testing.T) {
	for name, claim := range map[string]func() []string{
		"partitions":  func() []string { return []string{sliceA0, sliceB0} },
		"MPS session": func() []string { return []string{wholeA, wholeB} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				slow := func(_, effect string) error {
					if effect == "create instance" || effect == "destroy instance" {
						time.Sleep(time.Second)
					}
					return nil
				}
				b.beforeEffect(slow)
				two := newClaim("two", claim()...)
				pause := time.Millisecond
				traffic := []string{wholeA + "-mig-1g10gb-1", wholeA + "-mig-1g10gb-2", wholeB + "-mig-1g10gb-1", wholeB + "-mig-1g10gb-2"}
				if name == "MPS session" {
					// Only the locks are in its way.
					configure(two, fromClaim, gpuMPS)
					traffic, pause = []string{wholeC}, 100*time.Millisecond
				}
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				var served atomic.Int32
				for w, device := range traffic {
					wg.Go(func() {
						time.Sleep(time.Duration(w) * 300 * time.Millisecond)
						for n := 0; ctx.Err() == nil; n++ {
							uid := fmt.Sprintf("w%d-%d", w, n)
							if _, err := m.Prepare(t.Context(), newClaim(uid, device)); err != nil {
								t.Error(err)
							}
							_ = m.Unprepare(t.Context(), types.UID(uid))
							served.Add(1)
							time.Sleep(pause)
						}
					})
				}
				time.Sleep(5 * time.Second)
				call, cancel := context.WithTimeout(t.Context(), 45*time.Second)
				defer cancel()
				if _, err := m.Prepare(call, two); err != nil {
					t.Errorf("after %d others: %v", served.Load(), err)
				}
				stop()
				wg.Wait()
				mustUnprepare(t, m, "two")
				b.wantNothing()
			})
		})
	}
}

// 32 partitions on two GPUs are made at the same time on both.
func TestGroupsAreMadeAtTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		b.beforeEffect(func(_, effect string) error {
			if effect == "create instance" {
				time.Sleep(2 * time.Second)
			}
			return nil
		})
		var devices []string
		for i := range 7 {
			devices = append(devices, fmt.Sprintf("%s-mig-1g10gb-%d", wholeA, i), fmt.Sprintf("%s-mig-1g10gb-%d", wholeB, i))
		}
		start := time.Now()
		mustPrepare(t, m, newClaim("u1", devices...))
		if took := time.Since(start); took != 14*time.Second {
			t.Errorf("14 partitions of 2 s on 2 GPUs took %s", took)
		}
		mustUnprepare(t, m, "u1")
		b.wantNothing()
	})
}

// TestJointTaskKeepsNoGPU: what is due on several GPUs together does not wait for one of them while it has another.
func TestJointTaskKeepsNoGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
		if err := os.Remove(m.store.Path("u1")); err != nil { // its session is nobody's now
			t.Fatal(err)
		}
		release, err := b.manager().locks.GPUs(t.Context(), []string{pciC})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := m.cleanUpGPU(t.Context(), pciA); err != nil {
			t.Error(err)
		}
		if waited := time.Since(start); waited > 2*time.Second {
			t.Errorf("GPU A has waited %s for GPU C", waited)
		}
		release()
		mustReconcile(t, m)
		b.wantNothing()
	})
}

// TestOtherGPUFails: a GPU of a claim that waited when another one failed does not say that it has waited for long.
func TestOtherGPUFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", sliceB0))
		b.beforeEffect(func(_, effect string) error {
			if effect == "create instance" {
				time.Sleep(3 * time.Second)
				return gpu.ErrNoPermission
			}
			return nil
		})
		_, err := m.Prepare(t.Context(), newClaim("u2", sliceA0, sliceB0))
		wantError(t, err, "no permission")
		if err != nil && strings.Contains(err.Error(), sliceB0) {
			t.Errorf("it did not wait to the end for the place on GPU B: %v", err)
		}
	})
}
