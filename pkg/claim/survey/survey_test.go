// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package survey

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

const (
	pciA = claimtest.PCIA
	pciB = claimtest.PCIB
)

// TestMain keeps what is logged off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// hardware answers with the instances of GPUs, or with errors.
type hardware struct {
	step.Partitions
	mu        sync.Mutex
	instances map[string][]gpu.Instance
	errs      map[string]error
}

func (h *hardware) State(_ context.Context, pciAddress string) (gpu.MIGState, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return gpu.MIGState{Enabled: true, Instances: h.instances[pciAddress]}, h.errs[pciAddress]
}

func (h *hardware) set(pciAddress string, err error, instances ...gpu.Instance) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.instances[pciAddress], h.errs[pciAddress] = instances, err
}

// supervisor answers with the sessions of the node, or with an error.
type supervisor struct {
	step.Sharing
	sessions map[string]mps.Status
	err      error
}

func (s *supervisor) Sessions(context.Context) (map[string]mps.Status, error) {
	return s.sessions, s.err
}

// rig is a node and a surveyor.
type rig struct {
	*Surveyor
	*hardware
	*supervisor
	dir string
	now time.Duration
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{dir: t.TempDir(), hardware: &hardware{instances: map[string][]gpu.Instance{}, errs: map[string]error{}}, supervisor: &supervisor{}}
	store, err := journal.Open(t.Context(), r.dir, "boot-1", journal.OS{})
	if err != nil {
		t.Fatal(err)
	}
	r.Surveyor = New(store, r.otherLocks(t), &step.Kit{Partitions: r.hardware, Sharing: r.supervisor}, func() time.Duration { return r.now }, nil)
	return r
}

// otherLocks are those of another process.
func (r *rig) otherLocks(t *testing.T) *lock.Locks {
	t.Helper()
	locks, err := lock.New(filepath.Join(r.dir, "locks"))
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

func (r *rig) save(t *testing.T, uid types.UID, state journal.State, devices ...journal.Device) {
	t.Helper()
	record := journal.New(journal.Ref{Namespace: "default", Name: string(uid), UID: uid}, "boot-1")
	record.State = state
	for _, d := range devices {
		record.Add(d)
	}
	if err := r.store.Save(record); err != nil {
		t.Fatal(err)
	}
}

// look makes a survey and renders what it says of one GPU.
func (r *rig) look(t *testing.T, pciAddress string) []string {
	t.Helper()
	status := r.Survey(t.Context(), claimtest.Inventory(t))
	var lines []string
	for _, s := range status.Static {
		if s.PCIAddress == pciAddress {
			lines = append(lines, fmt.Sprintf("static %d %s gone=%v", s.Placement.Start, s.UUID, s.Gone))
		}
	}
	for _, c := range status.Conditions {
		if c.PCIAddress != pciAddress {
			continue
		}
		where := "whole"
		if c.Where != nil {
			where = fmt.Sprint(c.Where.Start)
		}
		lines = append(lines, fmt.Sprintf("%s %s", c.Reason, where))
	}
	return lines
}

func instance(start int, uuids ...string) gpu.Instance {
	i := gpu.Instance{ID: 7 + start, ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}}
	for n, uuid := range uuids {
		i.Compute = append(i.Compute, gpu.ComputeInstance{ID: n, UUID: uuid})
	}
	return i
}

// slice returns a 1g partition of A, which exists if it has a UUID.
func slice(kind device.Kind, start int, uuid string) journal.Device {
	d := journal.Device{
		Requests: []string{"r0"}, Pool: claimtest.PoolName, Device: fmt.Sprintf("slice-%d", start), Type: kind, PCIAddress: pciA,
		Partition: &journal.Partition{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}, UUID: uuid},
	}
	if uuid != "" {
		d.Partition.Live = &partition.Live{UUID: uuid}
	}
	return d
}

// TestClassify shows what the instances of a GPU mean in the light of the journal.
func TestClassify(t *testing.T) {
	gone := slice(device.Partition, 4, "MIG-4")
	gone.Partition.Live = nil
	admin := slice(device.Partition, 4, "MIG-4")
	admin.Admin = true
	type claim struct {
		state  journal.State
		device journal.Device
	}
	for name, test := range map[string]struct {
		claims    []claim
		damaged   string // a file of the journal
		instances []gpu.Instance
		want      []string
	}{
		"nothing": {},
		"of somebody else, in order": {
			instances: []gpu.Instance{instance(4, "MIG-4"), instance(0, "MIG-0")},
			want:      []string{"static 0 MIG-0 gone=false", "static 4 MIG-4 gone=false"},
		},
		"bare":          {instances: []gpu.Instance{instance(4)}, want: []string{"occupied 4"}},
		"divided":       {instances: []gpu.Instance{instance(4, "MIG-4", "MIG-5")}, want: []string{"occupied 4"}},
		"without UUID":  {instances: []gpu.Instance{instance(4, "")}, want: []string{"occupied 4"}},
		"of a claim":    {claims: []claim{{journal.Prepared, slice(device.Partition, 4, "MIG-4")}}, instances: []gpu.Instance{instance(4, "MIG-4")}},
		"being made":    {claims: []claim{{journal.Preparing, slice(device.Partition, 4, "")}}, instances: []gpu.Instance{instance(4)}, want: []string{"release-pending 4"}},
		"not made yet":  {claims: []claim{{journal.Preparing, slice(device.Partition, 4, "")}}},
		"to be removed": {claims: []claim{{journal.Unpreparing, slice(device.Partition, 4, "MIG-4")}}, instances: []gpu.Instance{instance(4, "MIG-4")}, want: []string{"release-pending 4"}},
		"replaced": {
			claims: []claim{{journal.Prepared, slice(device.Partition, 4, "MIG-4")}}, instances: []gpu.Instance{instance(4, "MIG-5")},
			want: []string{"static 4 MIG-5 gone=false"},
		},
		"replaced after it was gone": {
			claims: []claim{{journal.Prepared, gone}}, instances: []gpu.Instance{instance(4, "MIG-5")},
			want: []string{"static 4 MIG-5 gone=false"},
		},
		"static in use": {
			claims: []claim{{journal.Prepared, slice(journal.Static, 4, "MIG-4")}}, instances: []gpu.Instance{instance(4, "MIG-4")},
			want: []string{"static 4 MIG-4 gone=false"},
		},
		"static gone": {claims: []claim{{journal.Prepared, slice(journal.Static, 4, "MIG-4")}}, want: []string{"static 4 MIG-4 gone=true"}},
		"static replaced": {
			claims: []claim{{journal.Prepared, slice(journal.Static, 4, "MIG-4")}}, instances: []gpu.Instance{instance(4, "MIG-5")},
			want: []string{"static 4 MIG-5 gone=false", "static 4 MIG-4 gone=true"},
		},
		"observed":              {claims: []claim{{journal.Prepared, admin}}, instances: []gpu.Instance{instance(4, "MIG-4")}, want: []string{"static 4 MIG-4 gone=false"}},
		"observed, gone":        {claims: []claim{{journal.Prepared, admin}}},
		"a file is damaged":     {damaged: "{", instances: []gpu.Instance{instance(4, "MIG-4")}, want: []string{"occupied 4"}},
		"static, a damaged one": {claims: []claim{{journal.Prepared, slice(journal.Static, 4, "MIG-4")}}, damaged: "{", instances: []gpu.Instance{instance(4, "MIG-4")}, want: []string{"static 4 MIG-4 gone=false"}},
		"a damaged one of another GPU": {
			damaged:   `{"devices":[{"pool":"p","device":"d","type":"mig","pciAddress":"` + pciB + `","partition":{"profileID":19}}]}`,
			instances: []gpu.Instance{instance(4, "MIG-4")}, want: []string{"static 4 MIG-4 gone=false"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			for i, c := range test.claims {
				r.save(t, types.UID(fmt.Sprintf("u%d", i)), c.state, c.device)
			}
			if test.damaged != "" {
				if err := os.WriteFile(r.store.Path("bad"), []byte(test.damaged), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			r.set(pciA, nil, test.instances...)
			if diff := cmp.Diff(test.want, r.look(t, pciA)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if got := r.look(t, pciB); len(got) > 0 {
				t.Errorf("of another GPU: %v", got)
			}
		})
	}
}

// TestIsGone shows that a partition once found to be missing stays so while its GPU does
// not answer, and in the eyes of a claim that only observes it.
func TestIsGone(t *testing.T) {
	r := newRig(t)
	d, other := slice(device.Partition, 4, "MIG-4"), slice(device.Partition, 0, "MIG-0")
	r.save(t, "u1", journal.Prepared, d, other)
	want := func(when string, gone bool) {
		t.Helper()
		r.look(t, pciA)
		if got := r.IsGone("u1", &d); got != gone {
			t.Errorf("%s: got %v, want %v", when, got, gone)
		}
		if r.IsGone("u1", &other) {
			t.Errorf("%s: the other partition is gone", when)
		}
	}
	if r.IsGone("u1", &d) {
		t.Error("before the first survey")
	}
	r.set(pciA, nil, instance(0, "MIG-0"), instance(4, "MIG-4"))
	want("both there", false)
	r.set(pciA, gpu.ErrLost)
	want("the GPU does not answer", false)
	r.set(pciA, nil, instance(0, "MIG-0"))
	want("one gone", true)
	if r.IsGone("u2", &d) {
		t.Error("the next claim in the place, whose partition has the same UUID, has lost it")
	}
	r.set(pciA, gpu.ErrLost)
	want("the GPU does not answer any more", true)
	r.set(pciA, nil, instance(0, "MIG-0"), instance(4, "MIG-44"))
	want("another in its place", true)
	made := d
	made.Partition = &journal.Partition{ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}, UUID: "MIG-44", Live: &partition.Live{UUID: "MIG-44"}}
	r.save(t, "u1", journal.Prepared, made, other)
	r.look(t, pciA)
	if r.IsGone("u1", &made) {
		t.Error("the one that was made again is gone")
	}
	whole := journal.Device{Type: device.Whole, PCIAddress: pciA}
	if r.IsGone("u1", &whole) {
		t.Error("a whole GPU is gone")
	}
}

// TestDegraded shows what a GPU that does not answer is published with.
func TestDegraded(t *testing.T) {
	for err, want := range map[error]string{
		gpu.ErrLost: "gpu-lost whole", gpu.ErrNotFound: "gpu-lost whole", gpu.ErrResetRequired: "reset-required whole",
		gpu.ErrHung: "unresponsive whole", gpu.ErrUnknown: "unresponsive whole", errors.New("other"): "unresponsive whole",
		gpu.ErrNotSupported: "", gpu.ErrDriverNotLoaded: "",
	} {
		r := newRig(t)
		r.set(pciA, nil, instance(0, "MIG-0"))
		r.save(t, "half", journal.Preparing, slice(device.Partition, 4, ""))
		known := r.look(t, pciA)
		if diff := cmp.Diff([]string{"static 0 MIG-0 gone=false"}, known); diff != "" {
			t.Fatalf("-want +got:\n%s", diff)
		}
		r.set(pciA, err)
		wantLines := known
		if want != "" {
			wantLines = append(wantLines, want)
		}
		wantLines = append(wantLines, "release-pending 4") // it may have been made
		if diff := cmp.Diff(wantLines, r.look(t, pciA)); diff != "" {
			t.Errorf("%v: -want +got:\n%s", err, diff)
		}
	}
}

// TestBusyForLong shows that a GPU that is busy at every survey is waited for after a
// while, and not for ever.
func TestBusyForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.set(pciA, nil, instance(0, "MIG-0"))
		before := r.look(t, pciA)
		r.set(pciA, nil)
		release, err := r.locks.GPUs(t.Context(), []string{pciA})
		if err != nil {
			t.Fatal(err)
		}
		survey := func(when string, want []string, wait time.Duration) {
			t.Helper()
			start := time.Now()
			if diff := cmp.Diff(want, r.look(t, pciA)); diff != "" {
				t.Errorf("%s: -want +got:\n%s", when, diff)
			}
			if took := time.Since(start); took != wait {
				t.Errorf("%s: waited %s, want %s", when, took, wait)
			}
		}
		survey("at first", before, 0)
		r.now = busyLimit - 1
		survey("before the limit", before, 0)
		r.now = busyLimit
		survey("it stays busy", before, busyWait)
		time.AfterFunc(busyWait/2, release)
		survey("it is free meanwhile", nil, busyWait/2)
		// From now on it counts anew.
		release, err = r.locks.GPUs(t.Context(), []string{pciA})
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		survey("busy again", nil, 0)
	})
}

// TestBusyElsewhere shows that a GPU that another process has is not waited for, and that
// one that never gets it back is not offered.
func TestBusyElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		release, err := r.otherLocks(t).GPUs(t.Context(), []string{pciA})
		if err != nil {
			t.Fatal(err)
		}
		for _, test := range []struct {
			at   time.Duration
			want []string
		}{{0, nil}, {busyLimit, nil}, {elsewhereLimit - 1, nil}, {elsewhereLimit, []string{"unresponsive whole"}}} {
			r.now = test.at
			start := time.Now()
			if diff := cmp.Diff(test.want, r.look(t, pciA)); diff != "" || time.Since(start) != 0 {
				t.Errorf("after %s, waited %s: -want +got:\n%s", test.at, time.Since(start), diff)
			}
		}
		release()
		if got := r.look(t, pciA); len(got) > 0 {
			t.Errorf("given back: %v", got)
		}
	})
}

// TestSilentSupervisor shows that people are told of a supervisor that does not answer,
// after a while.
func TestSilentSupervisor(t *testing.T) {
	r := newRig(t)
	r.err = sharing.ErrNoSupervisor
	for _, test := range []struct {
		at   time.Duration
		err  error
		want []string
	}{
		{0, sharing.ErrNoSupervisor, nil},
		{silenceLimit, sharing.ErrNoSupervisor, []string{string(device.MPSUnavailable) + " whole"}},
		{silenceLimit + 1, nil, nil},
		{silenceLimit + 2, sharing.ErrNoSupervisor, nil},
	} {
		r.now, r.err = test.at, test.err
		if diff := cmp.Diff(test.want, r.look(t, pciA)); diff != "" {
			t.Errorf("after %s: -want +got:\n%s", test.at, diff)
		}
	}
}
