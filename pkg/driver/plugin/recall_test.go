// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestRecall: which GPUs are known when none of them answers.
func TestRecall(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		boot     string
		removed  []string
		inUse    []string
		inUseErr error
		want     []string
	}{
		"same boot":               {boot: "boot-1", want: []string{firstGPU, secondGPU}},
		"taken out":               {boot: "boot-1", removed: []string{firstGPU}, want: []string{secondGPU}},
		"taken out, in use":       {boot: "boot-1", removed: []string{firstGPU}, inUse: []string{onePart}, want: []string{firstGPU, secondGPU}},
		"earlier boot":            {boot: "boot-0"},
		"earlier boot, in use":    {boot: "boot-0", inUse: []string{onePart}, want: []string{firstGPU}},
		"earlier boot, not known": {boot: "boot-0", inUseErr: errors.New("input/output error"), want: []string{firstGPU, secondGPU}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newIdleStepper(t)
			dir := t.TempDir()
			write(t, dir, test.boot, testNodeWith(firstGPU, secondGPU))
			s.loop.gpus.file = lastseen.New(dir, "boot-1")
			s.claims.setInUse(test.inUse...)
			s.hardware.removed = test.removed
			s.claims.inUseErr = test.inUseErr
			s.hardware.setNode(&gpu.Node{Broken: []gpu.Broken{broken(firstGPU, gpu.ErrLost)}})

			published := func(when string, want []string) {
				t.Helper()
				var got []string
				if s.claims.inventory != nil {
					got = pciAddresses(s.claims.inventory)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", when, diff)
				}
			}
			monitor := &fakeMonitor{}
			s.loop.health = monitor
			s.loop.recall(s.ctx)
			published("at first", test.want)
			if len(monitor.uuids) > 0 {
				t.Error("the health of GPUs is read before they can be")
			}
			s.discover()
			s.poll(time.Second)
			published("after a discovery", test.want)
			// Claims that have gone, and a policy that has changed, make no difference in
			// the boot in which a GPU was seen.
			s.claims.setInUse()
			s.claims.inUseErr = nil
			s.policy.set(onlyWhole(), nil)
			s.poll(time.Hour)
			want := test.want
			switch {
			case test.boot != "boot-1":
				want = nil
			case test.removed != nil:
				want = []string{secondGPU}
			}
			published("without claims", want)
			if conditions := s.loop.gpus.conditions(); (len(conditions) == 0) != (len(want) == 0) && test.boot == "boot-1" {
				t.Errorf("conditions %+v", conditions)
			}
			// The next process knows the same.
			seen, removed, err := lastseen.New(dir, "boot-1").Read()
			if err != nil || len(seen.GPUs) != len(want) || len(removed) > 0 {
				t.Errorf("the file says %+v, %v", seen, err)
			}
		})
	}
}

// TestRecalledGPUIsFound: a GPU of an earlier boot that was found again stays without
// claims.
func TestRecalledGPUIsFound(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	dir := t.TempDir()
	write(t, dir, "boot-0", testNodeWith(firstGPU))
	s.loop.gpus.file = lastseen.New(dir, "boot-1")
	s.claims.setInUse(onePart)
	s.loop.recall(s.ctx)
	s.discover()
	s.hardware.setNode(&gpu.Node{})
	s.discover()
	s.claims.setInUse()
	s.poll(time.Hour)
	if got := pciAddresses(s.claims.inventory); !cmp.Equal(got, []string{firstGPU}) {
		t.Errorf("known are %v", got)
	}
	if got := s.loop.gpus.conditions(); len(got) != 1 || got[0].Reason != device.Lost {
		t.Errorf("conditions %+v", got)
	}
}
