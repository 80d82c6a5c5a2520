// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// fakePartitions notes what it was asked for.
type fakePartitions struct {
	Partitions
	expect    partition.Expect
	destroyed []string
	err       error
}

func (f *fakePartitions) Ensure(_ context.Context, _ partition.Address, expect partition.Expect, _ bool) (partition.Live, error) {
	f.expect = expect
	return partition.Live{InstanceID: 9, UUID: "MIG-9"}, f.err
}

func (f *fakePartitions) Destroy(_ context.Context, at partition.Address, uuid string, _ bool) error {
	f.destroyed = append(f.destroyed, at.String()+" "+uuid)
	return f.err
}

func instance(start int, uuids ...string) gpu.Instance {
	i := gpu.Instance{ID: 7 + start, ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}}
	for n, uuid := range uuids {
		i.Compute = append(i.Compute, gpu.ComputeInstance{ID: n, UUID: uuid})
	}
	return i
}

// known sets what a record says of its partitions.
func known(r *journal.Record, uuid string, live, remaking bool) *journal.Record {
	for i := range r.Devices {
		p := r.Devices[i].Partition
		if p == nil {
			continue
		}
		p.UUID, p.Remaking = uuid, remaking
		if live {
			p.Live = &partition.Live{InstanceID: 7, UUID: uuid}
		}
	}
	return r
}

func inState(r *journal.Record, state journal.State) *journal.Record {
	r.State = state
	return r
}

// partitionShare returns a share of the partition in place 4 of A.
func partitionShare(id string) journal.Device {
	d := migSlice("p", pciA, 4)
	d.Type, d.ShareID = device.TimeSlice, shareOf("p", pciA, id, device.TimeSlice, nil).ShareID
	return d
}

// TestPartitionCheck shows which instance in the place of a partition is accepted, before
// anything is done and when it is done.
func TestPartitionCheck(t *testing.T) {
	there := []gpu.Instance{instance(0, "MIG-0"), instance(4, "MIG-4")}
	for name, test := range map[string]struct {
		record    *journal.Record
		others    []*journal.Record
		instances []gpu.Instance
		attempt   Attempt
		want      string // part of the error, empty for none
		expect    partition.Expect
	}{
		"first, nothing there":       {claimOf("u1", migSlice("p", pciA, 4)), nil, there[:1], First, "", partition.ExpectNothing},
		"first, one there":           {claimOf("u1", migSlice("p", pciA, 4)), nil, there, First, "is there already", partition.ExpectNothing},
		"first, bare one there":      {claimOf("u1", migSlice("p", pciA, 4)), nil, []gpu.Instance{instance(4)}, First, "is there already", partition.ExpectNothing},
		"resumed, one there":         {claimOf("u1", migSlice("p", pciA, 4)), nil, there, Resumed, "", partition.ExpectOurs},
		"resumed, nothing there":     {claimOf("u1", migSlice("p", pciA, 4)), nil, nil, Resumed, "", partition.ExpectOurs},
		"repeated, its own":          {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), nil, there, Repeated, "", partition.ExpectUUID("MIG-4")},
		"repeated, another's":        {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-1", true, false), nil, there, Repeated, "in the place of MIG-1", partition.ExpectUUID("MIG-1")},
		"resumed after it was gone":  {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-1", false, true), nil, there, Resumed, "", partition.ExpectOurs},
		"gone, another in its place": {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-1", false, false), nil, there, Repeated, "in the place of MIG-1", partition.ExpectUUID("MIG-1")},
		"second share": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{known(claimOf("u2", partitionShare("s2")), "MIG-4", true, false)},
			there, First, "", partition.ExpectUUID("MIG-4"),
		},
		"second share of one half made": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{claimOf("u2", partitionShare("s2"))},
			[]gpu.Instance{instance(4)}, First, "", partition.ExpectOurs,
		},
		"second share of one that is gone": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{known(claimOf("u2", partitionShare("s2")), "MIG-1", true, false)},
			nil, First, "is gone; it is made again when", partition.ExpectNothing,
		},
		"second share of one that was replaced": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{known(claimOf("u2", partitionShare("s2")), "MIG-1", true, false)},
			there, First, "MIG-4 is in its place", partition.ExpectNothing,
		},
		"a share of the one before is being released": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{
				inState(known(claimOf("u2", partitionShare("s2")), "MIG-1", true, false), journal.Unpreparing),
				inState(known(claimOf("u3", partitionShare("s3")), "MIG-4", true, false), journal.Prepared),
			},
			there, First, "", partition.ExpectUUID("MIG-4"),
		},
		"the other share is being released and gone": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{inState(known(claimOf("u2", partitionShare("s2")), "MIG-4", true, false), journal.Unpreparing)},
			nil, First, "", partition.ExpectUUID("MIG-4"),
		},
		"the other share is being released and half gone": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{inState(known(claimOf("u2", partitionShare("s2")), "MIG-4", true, false), journal.Unpreparing)},
			[]gpu.Instance{instance(4)}, First, "", partition.ExpectUUID("MIG-4"),
		},
		"one share is being released and gone, another's process died": {
			claimOf("u1", partitionShare("s1")), []*journal.Record{
				inState(known(claimOf("u2", partitionShare("s2")), "MIG-1", true, false), journal.Unpreparing),
				inState(claimOf("u3", partitionShare("s3")), journal.Preparing),
			},
			there, First, "", partition.ExpectOurs,
		},
	} {
		t.Run(name, func(t *testing.T) {
			fake := &fakePartitions{}
			s := &Scene{
				Record: test.record, Others: &journal.Snapshot{Records: test.others},
				Instances: map[string][]gpu.Instance{pciA: test.instances}, Attempt: test.attempt,
			}
			steps := (&Kit{Partitions: fake}).Steps(s.Record)
			err := Check(steps, s)
			if test.want == "" && err != nil {
				t.Errorf("got %v", err)
			}
			if test.want != "" {
				claimtest.WantError(t, err, "device p: ", test.want)
			}
			if _, err := Apply(t.Context(), steps, s); err != nil {
				t.Fatal(err)
			}
			if fake.expect != test.expect {
				t.Errorf("made with %+v, want %+v", fake.expect, test.expect)
			}
			p := s.Record.Devices[0].Partition
			if p.LiveUUID() != "MIG-9" || p.UUID != "MIG-9" || p.Remaking {
				t.Errorf("noted: %+v", p)
			}
		})
	}
}

// TestPartitionFailures shows which failures have nothing to undo.
func TestPartitionFailures(t *testing.T) {
	for err, begun := range map[error]int{partition.ErrForeign: 0, gpu.ErrNoRoom: 1, errBroken: 1} {
		s := &Scene{Record: claimOf("u1", migSlice("p", pciA, 4)), Others: &journal.Snapshot{}}
		steps := (&Kit{Partitions: &fakePartitions{err: err}}).Steps(s.Record)
		if got, applyErr := Apply(t.Context(), steps, s); got != begun || !errors.Is(applyErr, err) {
			t.Errorf("%v: got %d begun, want %d (%v)", err, got, begun, applyErr)
		}
	}
}

// TestPartitionUndo shows when a partition is destroyed, and which.
func TestPartitionUndo(t *testing.T) {
	const at = "profile 19 at 4:1 on GPU " + pciA + " "
	for name, test := range map[string]struct {
		record *journal.Record
		others []*journal.Record
		want   []string
	}{
		"never known":         {claimOf("u1", migSlice("p", pciA, 4)), nil, []string{at}},
		"live":                {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), nil, []string{at + "MIG-4"}},
		"gone":                {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-1", false, false), nil, []string{at + "MIG-1"}},
		"shared":              {known(claimOf("u1", partitionShare("s1")), "MIG-4", true, false), []*journal.Record{claimOf("u2", partitionShare("s2"))}, nil},
		"both being released": {known(claimOf("u1", partitionShare("s1")), "MIG-4", true, false), []*journal.Record{inState(claimOf("u2", partitionShare("s2")), journal.Unpreparing)}, []string{at + "MIG-4"}},
	} {
		t.Run(name, func(t *testing.T) {
			fake := &fakePartitions{}
			s := &Scene{Record: test.record, Others: &journal.Snapshot{Records: test.others}}
			steps := (&Kit{Partitions: fake}).Steps(s.Record)
			if errs := Undo(t.Context(), steps, len(steps), s); len(errs) != 0 {
				t.Fatal(errs)
			}
			if diff := cmp.Diff(test.want, fake.destroyed); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if len(s.Record.Devices) != 0 {
				t.Errorf("left in the record: %+v", s.Record.Devices)
			}
		})
	}
}

// TestOverlap shows what no other claim may have while a step is applied.
func TestOverlap(t *testing.T) {
	for name, test := range map[string]struct {
		own, other journal.Device
		state      journal.State // of the other
		attempt    Attempt
		want       string // the other device, or nothing
	}{
		"beside":                {migSlice("p", pciA, 0), migSlice("q", pciA, 4), journal.Prepared, First, ""},
		"same place":            {migSlice("p", pciA, 0), migSlice("q", pciA, 0), journal.Prepared, First, "q"},
		"same place, resumed":   {migSlice("p", pciA, 0), migSlice("q", pciA, 0), journal.Prepared, Resumed, "q"},
		"same place, repeated":  {migSlice("p", pciA, 0), migSlice("q", pciA, 0), journal.Prepared, Repeated, ""},
		"being released":        {migSlice("p", pciA, 0), wholeGPU("w", pciA), journal.Unpreparing, First, "w"},
		"whole":                 {wholeGPU("w", pciA), migSlice("q", pciA, 0), journal.Prepared, First, "q"},
		"observed by this":      {observed(wholeGPU("w", pciA)), migSlice("q", pciA, 0), journal.Prepared, First, ""},
		"observed by the other": {wholeGPU("w", pciA), observed(wholeGPU("w", pciA)), journal.Prepared, First, ""},
		"another GPU":           {wholeGPU("w", pciA), wholeGPU("v", pciB), journal.Prepared, First, ""},
	} {
		t.Run(name, func(t *testing.T) {
			other := inState(claimOf("u2", test.other), test.state)
			s := &Scene{Record: claimOf("u1", test.own), Others: &journal.Snapshot{Records: []*journal.Record{other}}, Attempt: test.attempt}
			err := Check((&Kit{}).Steps(s.Record), s)
			var overlap *OverlapError
			if !errors.As(err, &overlap) {
				if test.want != "" || err != nil {
					t.Errorf("got %v, want an overlap with %q", err, test.want)
				}
				return
			}
			if overlap.OtherDevice != test.want || overlap.Other.UID != "u2" || overlap.Device != test.own.Device || overlap.Shares != 0 ||
				overlap.Abandoned() != (test.state != journal.Prepared) {
				t.Errorf("got %+v", overlap)
			}
			claimtest.WantError(t, err, "device "+test.own.Device+" overlaps with "+test.want+", which is "+string(test.state))
		})
	}
}

// TestShareCount shows how many claims get a share of a device.
func TestShareCount(t *testing.T) {
	turns := func(uid string) *journal.Record {
		return inState(claimOf("u", shareOf("t", pciA, uid, device.TimeSlice, nil)), journal.Prepared)
	}
	two := claimOf("u1", shareOf("t", pciA, "own1", device.TimeSlice, nil), shareOf("t", pciA, "own2", device.TimeSlice, nil))
	one := claimOf("u1", shareOf("t", pciA, "own1", device.TimeSlice, nil))
	preparing := inState(turns("s9"), journal.Preparing)
	preparing.Claim.UID = "half"
	for name, test := range map[string]struct {
		own     *journal.Record
		others  []*journal.Record
		limit   int
		attempt Attempt
		taken   bool
		other   journal.State
	}{
		"the last share":            {own: one, others: []*journal.Record{turns("s2")}, limit: 2},
		"one too many":              {own: one, others: []*journal.Record{turns("s2"), turns("s3")}, limit: 2, taken: true, other: journal.Prepared},
		"one of them half prepared": {own: one, others: []*journal.Record{turns("s2"), preparing}, limit: 2, taken: true, other: journal.Preparing},
		"one is being released":     {own: one, others: []*journal.Record{turns("s2"), inState(turns("s3"), journal.Unpreparing)}, limit: 2},
		"no limit":                  {own: one, others: []*journal.Record{turns("s2"), turns("s3")}},
		"has it already":            {own: one, others: []*journal.Record{turns("s2"), turns("s3")}, limit: 2, attempt: Resumed},
		"two fit":                   {own: two, others: []*journal.Record{turns("s2")}, limit: 3},
		"two do not fit":            {own: two, others: []*journal.Record{turns("s2")}, limit: 2, taken: true, other: journal.Prepared},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Scene{Record: test.own, Others: &journal.Snapshot{Records: test.others}, Attempt: test.attempt, MaxShares: map[string]int{}}
			if test.limit > 0 {
				s.MaxShares["t"] = test.limit
			}
			err := Check((&Kit{}).Steps(s.Record), s)
			var overlap *OverlapError
			if got := errors.As(err, &overlap); got != test.taken {
				t.Fatalf("got %v, want all taken: %v", err, test.taken)
			}
			if test.taken && (overlap.Shares != test.limit || overlap.OtherState != test.other) {
				t.Errorf("got %+v", overlap)
			}
		})
	}
}

// TestMarkGone shows which partitions are made again, and what the record says until then.
func TestMarkGone(t *testing.T) {
	static := migSlice("s", pciA, 4)
	static.Type = journal.Static
	for name, test := range map[string]struct {
		record    *journal.Record
		instances []gpu.Instance
		gone      bool
		want      journal.Partition // UUID, Remaking and whether it is live
		unmarked  bool              // what Remaking is when it was not made after all
	}{
		"there":              {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), []gpu.Instance{instance(4, "MIG-4")}, false, journal.Partition{UUID: "MIG-4", Live: &partition.Live{}}, false},
		"gone":               {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), nil, true, journal.Partition{UUID: "MIG-4", Remaking: true}, false},
		"bare":               {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), []gpu.Instance{instance(4)}, true, journal.Partition{UUID: "MIG-4", Remaking: true}, true},
		"never made":         {claimOf("u1", migSlice("p", pciA, 4)), nil, false, journal.Partition{}, false},
		"replaced":           {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), []gpu.Instance{instance(4, "MIG-5")}, false, journal.Partition{UUID: "MIG-4", Live: &partition.Live{}}, false},
		"known to be gone":   {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", false, false), nil, true, journal.Partition{UUID: "MIG-4", Remaking: true}, false},
		"being made again":   {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", false, true), nil, false, journal.Partition{UUID: "MIG-4", Remaking: true}, false},
		"made again, bare":   {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", false, true), []gpu.Instance{instance(4)}, false, journal.Partition{UUID: "MIG-4", Remaking: true}, true},
		"of somebody else":   {known(claimOf("u1", static), "MIG-4", true, false), nil, false, journal.Partition{UUID: "MIG-4", Live: &partition.Live{}}, false},
		"observed":           {known(claimOf("u1", observed(migSlice("p", pciA, 4))), "MIG-4", true, false), nil, false, journal.Partition{UUID: "MIG-4", Live: &partition.Live{}}, false},
		"of an old version":  {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), nil, true, journal.Partition{UUID: "MIG-4", Remaking: true}, false},
		"another is beside":  {known(claimOf("u1", migSlice("p", pciA, 4)), "MIG-4", true, false), []gpu.Instance{instance(0, "MIG-1")}, true, journal.Partition{UUID: "MIG-4", Remaking: true}, false},
		"without partitions": {claimOf("u1", wholeGPU("w", pciA)), nil, false, journal.Partition{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "of an old version" {
				test.record.Devices[0].Partition.UUID = ""
			}
			instances := map[string][]gpu.Instance{pciA: test.instances}
			s := &Scene{Record: test.record, Others: &journal.Snapshot{}, Instances: instances, Attempt: Repeated}
			if got := MarkGone(s); got != test.gone {
				t.Errorf("got %v, want %v", got, test.gone)
			}
			p := s.Record.Devices[0].Partition
			if p == nil {
				UnmarkGone(s.Record, instances)
				return
			}
			if p.UUID != test.want.UUID || p.Remaking != test.want.Remaking || (p.Live == nil) != (test.want.Live == nil) {
				t.Errorf("got %+v, want %+v", p, test.want)
			}
			left := partition.ExpectNothing
			if slices.ContainsFunc(test.instances, s.Record.Devices[0].At) {
				left = partition.ExpectUUID("MIG-4")
			}
			if test.gone && firstExpect(s) != left {
				t.Error("what appears in its place in between would be taken for the claim's")
			}
			UnmarkGone(s.Record, instances)
			if p.Remaking != test.unmarked {
				t.Errorf("not made after all: still remaking: %v, want %v", p.Remaking, test.unmarked)
			}
		})
	}
}

// firstExpect returns what the first partition of a scene is made with.
func firstExpect(s *Scene) partition.Expect {
	d := &s.Record.Devices[0]
	return ownedPartition{&Kit{}, d.Key()}.expect(s, d)
}

// TestLost finds the claims whose CDI specs may come to name another partition.
func TestLost(t *testing.T) {
	static := migSlice("s", pciA, 1)
	static.Type = journal.Static
	others := &journal.Snapshot{Records: []*journal.Record{
		known(claimOf("there", migSlice("p", pciA, 0)), "MIG-0", true, false),
		known(claimOf("gone", migSlice("q", pciA, 2)), "MIG-2", true, false),
		known(claimOf("replaced", migSlice("r", pciA, 3)), "MIG-3", true, false),
		known(claimOf("static", static), "MIG-1", true, false),
		known(claimOf("observer", observed(migSlice("q", pciA, 2))), "MIG-2", true, false),
		claimOf("not made", migSlice("t", pciA, 5)),
		claimOf("whole", wholeGPU("b", pciB)),
	}}
	var got []string
	for _, d := range Lost(others, pciA, []gpu.Instance{instance(0, "MIG-0"), instance(3, "MIG-33")}) {
		got = append(got, string(d.Record.Claim.UID))
	}
	if diff := cmp.Diff([]string{"gone", "replaced", "static", "observer"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if lost := Lost(others, pciB, nil); len(lost) != 0 {
		t.Errorf("on another GPU: %+v", lost)
	}
}

// TestExisting shows which partition of somebody else's a claim may use.
func TestExisting(t *testing.T) {
	static := migSlice("s", pciA, 4)
	static.Type = journal.Static
	for name, test := range map[string]struct {
		record    *journal.Record
		instances []gpu.Instance
		want      string
	}{
		"it is there":        {known(claimOf("u1", static), "MIG-4", false, false), []gpu.Instance{instance(4, "MIG-4")}, ""},
		"it is gone":         {known(claimOf("u1", static), "MIG-4", false, false), nil, "not there any more"},
		"another is there":   {known(claimOf("u1", static), "MIG-4", false, false), []gpu.Instance{instance(4, "MIG-5")}, "MIG-5 is in its place"},
		"it is divided":      {known(claimOf("u1", static), "MIG-4", false, false), []gpu.Instance{instance(4, "MIG-4", "MIG-5")}, "not there any more"},
		"observed":           {claimOf("u1", observed(migSlice("p", pciA, 4))), []gpu.Instance{instance(4, "MIG-4")}, ""},
		"nothing to observe": {claimOf("u1", observed(migSlice("p", pciA, 4))), []gpu.Instance{instance(0, "MIG-0")}, "admin access does not make one"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Scene{Record: test.record, Others: &journal.Snapshot{}, Instances: map[string][]gpu.Instance{pciA: test.instances}}
			steps := (&Kit{}).Steps(s.Record)
			checked := Check(steps, s)
			begun, err := Apply(t.Context(), steps, s)
			if test.want == "" {
				if checked != nil || err != nil || s.Record.Devices[0].Partition.LiveUUID() != "MIG-4" {
					t.Errorf("got %v, %v, %+v", checked, err, s.Record.Devices[0].Partition)
				}
				return
			}
			claimtest.WantError(t, checked, test.want)
			claimtest.WantError(t, err, test.want)
			if begun != 0 {
				t.Errorf("%d begun", begun)
			}
		})
	}
}
