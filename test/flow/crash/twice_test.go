// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// TestCrashTwice kills the driver when it has changed the hardware for the last
// time, and then its successor before every effect of its start, which cleans up.
func TestCrashTwice(t *testing.T) {
	t.Parallel()
	count := harness.Enumerate(t, "crashes", 60)
	for _, operation := range crashOperations {
		t.Run(operation.name, func(t *testing.T) {
			t.Parallel()
			s := newCrashScene(t, crashLayouts["partition turns MIG mode on"])
			s.operation = operation
			s.killTwice(t, count)
		})
	}
}

func (s *crashScene) killTwice(t *testing.T, count *harness.Enumeration) {
	changes := 0
	for _, e := range s.effects(t) {
		if s.changesGPUs(e) {
			changes++
		}
	}
	// Only these count: what the driver writes beside, at any time, would make it another effect.
	crash := func(t *testing.T) {
		if _, killed := s.crashFor(t, changes, s.changesGPUs); !killed {
			t.Fatalf("the hardware is not changed %d times", changes)
		}
	}
	crash(t)
	effects, _ := s.crashAtStart(t, 0)
	for n, more := 1, true; more; n++ {
		more = n <= len(effects)
		if !count.Find(n) {
			continue
		}
		passed := t.Run("before "+strconv.Itoa(n), func(t *testing.T) {
			crash(t)
			done, killed := s.crashAtStart(t, n)
			if killed {
				more = true
				t.Logf("killed before effect %d: %s", n, s.shorten(done[n-1]))
			}
			s.untilWithout(t, s.start(t, harness.Quiet))
			count.Ran(s.operation.name + ", then start")
		})
		if !passed {
			return
		}
	}
}

// changesGPUs reports whether an effect is the end of a change of the hardware. The driver's own locks
// are bytes of a file as well.
func (s *crashScene) changesGPUs(e killpoint.Effect) bool {
	return strings.HasPrefix(e.Call, "fcntl") && slices.Contains(e.Targets, sysroot.StatePath(s.n.Root))
}

// crashAtStart starts a driver and kills it before effect n, or when its start is
// over.
func (s *crashScene) crashAtStart(t *testing.T, n int) (effects []killpoint.Effect, killed bool) {
	t.Helper()
	d := s.n.MustSpawn(t, s.flags(harness.Quiet)...)
	d.Arm(n)
	err := d.Connect(t.Context(), s.n.RegistrarDir)
	if err == nil {
		_, err = d.TryPrepare(t.Context(), s.n.AllocateNamed(nil), harness.KubeletTimeout)
	}
	effects, killed = d.Disarm()
	if !killed && err != nil {
		t.Fatal(err)
	}
	d.Close()
	return effects, killed
}
