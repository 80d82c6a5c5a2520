// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// The world is small, so that a state is a few hundred bytes: GPUs, claims and sessions are numbers. The rules get the
// observations that an engine would make of it.

// place is a MIG profile at a placement. The zero value is the undivided GPU.
type place struct{ Profile, Start, Size int8 }

var undivided = place{}

// Overlaps reports whether two places on one GPU have a part in common.
func (p place) Overlaps(q place) bool {
	return p == undivided || q == undivided || p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

func (p place) real() record.Place {
	return record.Place{ProfileID: uint32(p.Profile), Placement: gpu.Placement{Start: int(p.Start), Size: int(p.Size)}}
}

func compact(p record.Place) place {
	return place{Profile: int8(p.ProfileID), Start: int8(p.Start), Size: int8(p.Size)}
}

const (
	// none is no session, noInstance what a spec names in place of an instance.
	none       int8 = 0
	noInstance int8 = -1
)

// kind is how a device comes about.
type kind uint8

const (
	undividedGPU kind = iota
	ofClaims          // a partition that is made for claims
	ofStranger        // a partition that somebody else made
)

// device is what a claim has on one GPU.
type device struct {
	GPU    int8
	Kind   kind
	Place  place
	Shared bool
	Admin  bool
	// Fixed means that only an administrator changes the MIG mode.
	Fixed bool
	// Session is the MPS session that it is in, with the limit that the claim needs.
	Session int8
	Limit   int8
	// Own means that the session is the claim's own.
	Own bool
	// Slice is the time slice that the claim asked for, or 0.
	Slice int8
	// Clients is how many shares the device has, or 0.
	Clients int8
}

// SameDevice reports whether both are slots of one shared device.
func (p *device) SameDevice(q *device) bool {
	return p.Shared && q.Shared && p.GPU == q.GPU && p.Kind == q.Kind && p.Place == q.Place && p.Session == q.Session
}

// Conflicts reports whether two claims cannot have both.
func (p *device) Conflicts(q *device) bool {
	return p.GPU == q.GPU && !p.Admin && !q.Admin && p.Place.Overlaps(q.Place) && !p.SameDevice(q)
}

// action is one of package rules.
type action struct {
	Do    rules.Do
	Claim int8
	GPU   int8
	// Part is one of the claim's, or -1.
	Part    int8
	Place   place
	Session int8
	// Value is a limit or a time slice.
	Value int8
}

// task is one of package rules.
type task struct {
	Claim   int8
	Aim     rules.Aim
	Actions []action
	Final   []action
	With    []int8
}

var (
	gpuNames     = [maxGPUs]string{"0000:1b:00.0", "0000:3b:00.0"}
	claimNames   = [maxClaims]types.UID{"claim-0", "claim-1", "claim-2"}
	partNames    = [maxParts]types.UID{"part-0", "part-1", "part-2"} // as if each were a share
	sessionNames = [maxSessions]string{"session-1", "session-2"}
	intervals    = [...]policy.Interval{"", policy.IntervalShort, policy.IntervalMedium, policy.IntervalLong}
	boots        = [...]string{"", "boot-1", "boot-2", "boot-3"}
	states       = [...]record.State{record.Preparing, record.Prepared, record.Releasing}
)

func index[T comparable](all []T, one T) int8 {
	for i := range all {
		if all[i] == one {
			return int8(i)
		}
	}
	return -1
}

// partOf is the part of a claim that has this key, or -1.
func partOf(key string) int8 {
	return int8(slices.IndexFunc(partNames[:], func(name types.UID) bool { return strings.HasSuffix(key, "-"+string(name)) }))
}

func compactAction(a *rules.Action) action {
	c := action{Do: a.Do, Claim: index(claimNames[:], a.Claim), GPU: index(gpuNames[:], a.GPU), Part: partOf(a.Key), Place: compact(a.Place)}
	if a.Session != "" {
		c.Session = index(sessionNames[:], a.Session) + 1
	}
	switch a.Do {
	case rules.StartSession:
		c.Value = int8(a.Demand.Percent)
	case rules.SetInterval, rules.Start:
		c.Value = index(intervals[:], a.Interval)
	}
	return c
}

func compactTask(t *rules.Task) task {
	c := task{Claim: index(claimNames[:], t.Claim), Aim: t.Aim}
	for i := range t.Actions {
		c.Actions = append(c.Actions, compactAction(&t.Actions[i]))
	}
	for i := range t.Final {
		c.Final = append(c.Final, compactAction(&t.Final[i]))
	}
	for _, with := range t.With {
		c.With = append(c.With, index(gpuNames[:], with))
	}
	return c
}

// tasks decides, and returns what the world carries out.
func (m *machine) tasks(o *rules.Observation) []task {
	plan := m.decide(*o)
	tasks := make([]task, len(plan.Tasks))
	for i := range plan.Tasks {
		tasks[i] = compactTask(&plan.Tasks[i])
	}
	return tasks
}

// deviceName is the same for shares of one device.
func deviceName(d *device) string {
	kind := "device"
	switch {
	case d.Session != none && d.Shared:
		kind = "mps"
	case d.Shared:
		kind = "timeslice"
	}
	return kind + "-" + gpuNames[d.GPU] + "-" + name(d.Place)
}
