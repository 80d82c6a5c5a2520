// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	pci  = "0000:1b:00.0"
	boot = "boot-1"
)

func slice(start int) record.Place {
	return record.Place{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}}
}

func instance(id, start int, compute ...gpu.ComputeInstance) gpu.Instance {
	return gpu.Instance{ID: id, ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}, Compute: compute}
}

func instances(all ...gpu.Instance) gpu.MIGState { return gpu.MIGState{Enabled: true, Instances: all} }

func wants(parts ...Part) Record {
	r := aRecord("u", record.Preparing, parts...)
	r.Wanted, r.Calling = true, true
	return r
}

func aRecord(uid types.UID, state record.State, parts ...Part) Record {
	return Record{Record: &record.Record{Claim: record.Ref{Namespace: "team", Name: string(uid), UID: uid}, BootID: boot, State: state, Devices: parts}}
}

func aPartition(start int) Part {
	return Part{Device: "gpu-mig", PCIAddress: pci, Type: device.Partition, Partition: &record.Partition{Place: slice(start)}, Divisible: true, DynamicMIG: true}
}

func whole() Part {
	return Part{Device: "gpu", PCIAddress: pci, Type: device.Whole, Divisible: true, DynamicMIG: true}
}

var errSilent = errors.New("no answer on the socket")

// TestVerdicts shows what people read when a claim does not get what it wants, and what other programs can tell apart.
func TestVerdicts(t *testing.T) {
	fixed, mps, turns := aPartition(0), whole(), whole()
	turns.Type, turns.Clients = device.TimeSlice, 1
	fixed.DynamicMIG = false
	mps.Type, mps.Sharing = device.MPS, &record.Sharing{Session: "gpu"}
	other := aRecord("o", record.Prepared, aPartition(0))
	other.Devices[0].Mark = record.Started
	guard := record.Guard{Claim: record.Ref{UID: "g"}, Path: "/data/file", Remedy: "remove it"}
	for name, test := range map[string]struct {
		want  Record
		there func(o *Observation)
		state State
		cause error
		says  string
	}{
		"another claim has it": {wants(aPartition(0)), func(o *Observation) { o.Records = append(o.Records, other) }, Waiting, ErrTaken, "gpu-mig overlaps with gpu-mig, which is prepared for claim team/o"},
		"foreign": {wants(aPartition(0)), func(o *Observation) {
			o.Hardware.MIGState = instances(instance(7, 0, gpu.ComputeInstance{UUID: "MIG-1"}))
		}, Refused, partition.ErrForeign, "GPU instance 7 is in its place"},
		"divided": {wants(whole()), func(o *Observation) {
			o.Hardware.MIGState = instances(instance(7, 0, gpu.ComputeInstance{UUID: "MIG-1"}))
		}, Refused, partition.ErrDivided, "the GPU is partitioned"},
		"too many of its own": {wants(turns, turns), func(*Observation) {}, Refused, nil, "2 shares of it, and it has 1"},
		"fixed mode":          {wants(fixed), func(*Observation) {}, Refused, nil, "nvidia-smi -i 0000:1b:00.0 -mig 1"},
		"compute mode":        {wants(mps), func(o *Observation) { o.Hardware.Exclusive = true }, Refused, nil, "-c DEFAULT"},
		"no supervisor":       {wants(mps), func(o *Observation) { o.Unsupervised = errSilent }, Waiting, errSilent, "no answer on the socket"},
		"guarded":             {wants(whole()), func(o *Observation) { o.Guards = []record.Guard{guard} }, Waiting, ErrGuarded, "(/data/file): remove it"},
		"in use":              {wants(whole()), func(o *Observation) { o.Hardware.Users = "process 4711 (python)" }, Waiting, gpu.ErrInUse, "process 4711 (python)"},
		"fabric":              {wants(whole()), func(o *Observation) { o.Hardware.Fabric = "in progress" }, Waiting, gpu.ErrFabricPending, "(in progress)"},
		"out of service":      {wants(whole()), func(o *Observation) { o.Hardware.Err = errSilent }, Pending, errSilent, "no answer on the socket"},
		"room":                {wants(aPartition(0)), func(*Observation) {}, Working, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := Observation{GPU: pci, Boot: boot, Records: []Record{test.want}}
			test.there(&o)
			plan := Decide(o)
			v, _ := plan.Verdict("u")
			if v.State != test.state || !errors.Is(v.Cause, test.cause) || !strings.Contains(v.Why, test.says) {
				t.Errorf("got %+v, want state %d, cause %v and %q", v, test.state, test.cause, test.says)
			}
			for _, task := range plan.Tasks {
				if task.Claim == "u" && test.state != Working {
					t.Errorf("there is something to do for it: %+v", task)
				}
			}
		})
	}
}

// TestSeveralParts shows that the parts of a claim on one GPU are made in one task, shares of one device once, and that
// they are released the other way round.
func TestSeveralParts(t *testing.T) {
	first, second, share := aPartition(0), aPartition(4), aPartition(4)
	for share, id := range map[*Part]types.UID{&second: "second", &share: "share"} {
		share.Type, share.Device, share.ShareID = device.TimeSlice, "gpu-shared", &id
	}
	o := Observation{GPU: pci, Boot: boot, Records: []Record{wants(first, second, share)}}
	do := func(p Plan) (all []ActionKind) {
		for _, a := range append(p.Tasks[0].Actions, p.Tasks[0].Final...) {
			all = append(all, a.Kind)
		}
		return all
	}
	want := []ActionKind{Announce, EnableMIG, Start, CreateGI, DropNamesakes, CreateCI, Start, CreateGI, DropNamesakes, CreateCI, Start, WriteSpec, MarkPrepared}
	if got := do(Decide(o)); !slices.Equal(got, want) {
		t.Errorf("made by %v, want %v", got, want)
	}
	r := &o.Records[0]
	r.State, r.Wanted, r.Calling = record.Releasing, false, false
	for i := range r.Devices {
		r.Devices[i].Mark = record.Started
	}
	o.Hardware.MIGState = instances(instance(7, 0, gpu.ComputeInstance{UUID: "MIG-1"}), instance(8, 4, gpu.ComputeInstance{UUID: "MIG-2"}))
	want = []ActionKind{RemoveSpec, DestroyCI, DestroyGI, Unstart, Unstart, DestroyCI, DestroyGI, DisableMIG, Clear}
	plan := Decide(o)
	if got := do(plan); !slices.Equal(got, want) || plan.Tasks[0].Actions[1].Key != "gpu-shared-second" {
		t.Errorf("released by %v, want %v", got, want)
	}
}

// TestRefusedUnderGuard shows that a partition that somebody made in a place which the claim's process had seen empty is not
// taken for the claim's, although an earlier record of the claim cannot be read.
func TestRefusedUnderGuard(t *testing.T) {
	r := wants(aPartition(0))
	r.Wanted, r.Devices[0].Mark = false, record.Started
	o := Observation{GPU: pci, Boot: boot, Records: []Record{r}, Guards: []record.Guard{{Claim: record.Ref{UID: "u"}, Path: "/data/file", Remedy: "remove it"}}}
	o.Hardware.MIGState = instances(instance(7, 0, gpu.ComputeInstance{UUID: "MIG-1"}))
	o.Refused = &Refusal{Action: Action{Kind: CreateGI, Claim: "u", GPU: pci, Key: "gpu-mig", Place: slice(0)}, Err: gpu.ErrNoRoom}
	plan := Decide(o)
	if len(plan.Tasks) != 1 || plan.Tasks[0].Actions[0].Kind != MarkLost {
		t.Fatalf("after the refusal: %+v", plan.Tasks)
	}
	o.Refused, o.Records[0].Devices[0].Mark = nil, record.Lost
	plan = Decide(o)
	if v, _ := plan.Verdict("u"); v.State != Refused || !errors.Is(v.Cause, partition.ErrForeign) {
		t.Errorf("got %+v, want that a foreign instance is in its place", v)
	}
}

// TestTakenOver shows that a release leaves the partition of another claim alone that a process made in the same place,
// because it could not read the record of the first.
func TestTakenOver(t *testing.T) {
	released, ready := aRecord("u", record.Releasing, aPartition(0)), aRecord("o", record.Prepared, aPartition(0))
	released.Devices[0].Mark, ready.Devices[0].Mark = record.Started, record.Started
	o := Observation{GPU: pci, Boot: boot, Records: []Record{released, ready}}
	o.Hardware.MIGState = instances(instance(7, 0, gpu.ComputeInstance{UUID: "MIG-1"}))
	plan := Decide(o)
	if len(plan.Tasks) == 0 || plan.Tasks[0].Claim != "u" || plan.Tasks[0].Aim != Release {
		t.Fatalf("the claim is not released: %+v", plan.Tasks)
	}
	for _, a := range plan.Tasks[0].Actions {
		if a.Kind != RemoveSpec && a.Kind != Clear {
			t.Errorf("the release does more than to forget the claim: %+v", a)
		}
	}
	o.Records = o.Records[:1]
	if plan = Decide(o); len(plan.Tasks) == 0 || !slices.ContainsFunc(plan.Tasks[0].Actions, func(a Action) bool { return a.Kind == DestroyGI }) {
		t.Errorf("a partition that no other claim has stays: %+v", plan.Tasks)
	}
}

// TestForeignInstances shows which instances without record are devices, and what is said about the others.
func TestForeignInstances(t *testing.T) {
	for name, test := range map[string]struct {
		compute []gpu.ComputeInstance
		guards  []record.Guard
		device  bool
		says    string
	}{
		"whole":      {compute: []gpu.ComputeInstance{{UUID: "MIG-1", Slices: 2}}, device: true},
		"unknown":    {compute: []gpu.ComputeInstance{{UUID: "MIG-1"}}, device: true},
		"incomplete": {says: "it has no compute instance"},
		"divided":    {compute: make([]gpu.ComputeInstance, 2), says: "2 compute instances"},
		"smaller":    {compute: []gpu.ComputeInstance{{UUID: "MIG-1", Slices: 1}}, says: "only a part of its slices"},
		"no UUID":    {compute: make([]gpu.ComputeInstance, 1), says: "no UUID"},
		"guarded":    {compute: []gpu.ComputeInstance{{UUID: "MIG-1"}}, guards: []record.Guard{{Claim: record.Ref{UID: "g"}, Path: "/data/file", Remedy: "remove it"}}, says: "/data/file"},
	} {
		t.Run(name, func(t *testing.T) {
			plan := Decide(Observation{GPU: pci, Boot: boot, Guards: test.guards, Hardware: Hardware{
				MIGState: instances(instance(7, 4, test.compute...)), Profiles: []gpu.Profile{{ID: 19, Slices: 2}},
			}})
			if got := len(plan.Static) == 1; got != test.device {
				t.Errorf("a device: %t", got)
			}
			if !test.device && (plan.Statements[0].Reason != Occupied || !strings.Contains(plan.Statements[0].Text, test.says)) {
				t.Errorf("got %+v, want %q", plan.Statements, test.says)
			}
		})
	}
}
