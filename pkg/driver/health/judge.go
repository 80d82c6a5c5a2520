// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/policy/xid"
)

const (
	// mostDoublings and longestHold bound how long a GPU that has failed again and again is held
	// back after it works again: for 128 quiet periods, or a day.
	mostDoublings = 7
	longestHold   = 24 * time.Hour
	// remember is for how long an earlier failure counts.
	remember = 7 * 24 * time.Hour
	// writeEvery is how often the file is written because a fault lasts.
	writeEvery = time.Minute
	// patience is how long something must last to be a fault that comes and goes in normal operation.
	patience = time.Minute
)

// Place is a partition at the time of an event.
type Place struct {
	// UUID is that of the MIG device. One that is made anew in its place may have the same.
	UUID      string        `json:"uuid"`
	ProfileID uint32        `json:"profileID"`
	Placement gpu.Placement `json:"placement"`
}

// identity tells the faults of a GPU apart.
type identity struct {
	reason    device.Reason
	xid       uint64
	partition string
	unplaced  bool
}

// ending is how a fault ends.
type ending string

const (
	// whenQuiet and afterReset are those of XIDs; whenRead means when a reading does not show it
	// any more.
	whenQuiet  = ending(xid.Quiet)
	afterReset = ending(xid.Reset)
	whenRead   = ending("reading")
)

// verdict says whether an XID needs anything to be done. The NVIDIA driver knows better than the
// table of XIDs.
type verdict string

const (
	// verdictTable means that the table decides: the driver has no recovery actions, or asks for one,
	// which is a condition of its own, or the GPU is lost.
	verdictTable verdict = ""
	// verdictDue means that the driver has not answered since the XID: nobody is evicted.
	verdictDue verdict = "due"
	// verdictHarmless means that the driver asks for no recovery action.
	verdictHarmless verdict = "harmless"
)

// fault is something that is wrong with a GPU, or with one partition of it.
type fault struct {
	Reason device.Reason `json:"reason"`
	// XID is the number for the reason XID.
	XID uint64 `json:"xid,omitempty"`
	// Value becomes the value of the taint.
	Value string `json:"value,omitempty"`
	// Partition is nil for all of the GPU.
	Partition *Place `json:"partition,omitempty"`
	// Unplaced says that it is of one partition, and that it is not known of which.
	Unplaced bool   `json:"unplaced,omitempty"`
	Ending   ending `json:"ending"`
	// Detail is what is wrong, for people.
	Detail string `json:"detail"`
	// First and Last are the times when it was noticed.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	// Gone is when it was proved to be over. From then on the GPU is held back because of it.
	Gone time.Time `json:"gone,omitzero"`

	// patient says that it counts only when it has lasted for a while.
	patient bool
	// held says that a Hold was reported.
	held bool
	// written is the value of Last for which the file was last written.
	written time.Time
}

func (f *fault) identity() identity {
	id := identity{reason: f.Reason, xid: f.XID, unplaced: f.Unplaced}
	if f.Partition != nil {
		id.partition = f.Partition.UUID
	}
	return id
}

// past is how often a GPU has had a fault that is over.
type past struct {
	Reason device.Reason `json:"reason"`
	XID    uint64        `json:"xid,omitempty"`
	Count  int           `json:"count"`
	Ended  time.Time     `json:"ended"`
}

// gpuHistory is the health of one GPU: its faults, past ones, and what readings are compared with.
type gpuHistory struct {
	// UUID is that of the GPU. Another GPU at the same address gets a new history.
	UUID   string   `json:"uuid"`
	Faults []*fault `json:"faults,omitempty"`
	Past   []*past  `json:"past,omitempty"`
	// Absent says that, by the last reading, the GPU works only after a reset.
	Absent bool `json:"absent,omitempty"`
	// Wants is the recovery action that the driver asked for at AskedAt, and NoActionSince is since when it
	// has asked for none. If AskedAt is set and the others are empty, the driver knows no recovery actions.
	Wants         gpu.RecoveryAction `json:"wants,omitempty"`
	AskedAt       time.Time          `json:"asked,omitzero"`
	NoActionSince time.Time          `json:"content,omitzero"`
	// Uncorrected counts memory errors as of the last reading. A reset sets it to 0.
	Uncorrected *uint64 `json:"uncorrected,omitempty"`

	// answered says that this process has had a reading, and since is when readings began to have
	// what counts only when it lasts.
	answered bool
	since    map[device.Reason]time.Time
}

// judge decides which faults GPUs have. It is for one goroutine at a time.
type judge struct {
	gpus map[string]*gpuHistory
	// touched says that the file has to be written.
	touched bool
	// held are those that were not reported yet.
	held []Hold
}

func newJudge() *judge { return &judge{gpus: map[string]*gpuHistory{}} }

// follow begins the history of the GPU at an address, if it is another one than before.
func (j *judge) follow(pciAddress, uuid string) {
	if g := j.gpus[pciAddress]; g == nil || g.UUID != uuid {
		j.touched = true
		j.gpus[pciAddress] = &gpuHistory{UUID: uuid}
	}
}

// of returns the history of a GPU. Nothing is remembered of one that is not followed.
func (j *judge) of(pciAddress string) *gpuHistory { return cmp.Or(j.gpus[pciAddress], &gpuHistory{}) }

// event makes a fault of an event, and returns what the XID means if it is one. The place is nil if
// the whole GPU is affected, or a partition that is not known. An XID that the policy ignores is no
// fault.
func (j *judge) event(e gpu.Event, at *Place, h *policy.Health) (x xid.XID) {
	g := j.of(e.PCIAddress)
	switch e.Kind {
	case gpu.EventXID:
		x = xid.Lookup(e.XID)
		if x.Under(h) == policy.EffectIgnore {
			break
		}
		number := strconv.FormatUint(e.XID, 10)
		f := &fault{
			Reason: device.XID, XID: e.XID, Value: number, Ending: ending(x.Recovery), Detail: "XID " + number + " (" + x.Name + ")",
		}
		if x.Scope != xid.WholeGPU {
			f.put(e, at)
		}
		j.see(g, f, e.Time)
	case gpu.EventUncorrectedECC:
		f := uncorrected()
		f.put(e, at)
		j.see(g, f, e.Time)
	case gpu.EventLost:
		j.see(g, &fault{Reason: device.Lost, Ending: whenRead, Detail: "the driver reports that it is lost"}, e.Time)
	case gpu.EventReset:
		j.reset(g, e.Time)
	}
	return x
}

// put sets the partition of a fault, if the event is about one.
func (f *fault) put(e gpu.Event, at *Place) {
	f.Partition, f.Unplaced = at, at == nil && e.InstanceID >= 0
	if f.Unplaced {
		f.Detail += " on a partition that is not known"
	}
}

func uncorrected() *fault {
	return &fault{Reason: device.UncorrectedECC, Ending: whenQuiet, Detail: "memory had an error that ECC could not correct"}
}

// see adds a fault that was found at a time, or prolongs the one that is known.
func (j *judge) see(g *gpuHistory, found *fault, at time.Time) {
	known := slices.IndexFunc(g.Faults, func(f *fault) bool { return f.identity() == found.identity() })
	if known < 0 {
		found.First, found.Last, found.written = at, at, at
		g.Faults = append(g.Faults, found)
		j.touched = true
		return
	}
	f := g.Faults[known]
	if !f.Gone.IsZero() {
		// It has come again while the GPU was held back.
		j.count(g, f, at)
		j.touched = true
	}
	if at.After(f.Last) {
		f.Last = at
	}
	if f.Last.Sub(f.written) >= writeEvery {
		f.written, j.touched = f.Last, true
	}
	f.Gone, f.held, f.Detail, f.Value = time.Time{}, false, found.Detail, found.Value
}

// dropGonePartitions ends the faults of partitions that do not exist any more, by a reading of the
// partitions that began at a time.
func (j *judge) dropGonePartitions(pciAddress string, instances []gpu.Instance, began time.Time) {
	j.drop(j.of(pciAddress), func(f *fault) bool {
		return f.Partition != nil && f.Last.Before(began) && !gpu.HasMIGDevice(instances, f.Partition.UUID)
	})
}

// hasPartitionFaults reports whether dropGonePartitions may end something.
func (j *judge) hasPartitionFaults(pciAddress string) bool {
	return slices.ContainsFunc(j.of(pciAddress).Faults, func(f *fault) bool { return f.Partition != nil })
}

func (j *judge) drop(g *gpuHistory, over func(*fault) bool) {
	before := len(g.Faults)
	if g.Faults = slices.DeleteFunc(g.Faults, over); len(g.Faults) != before {
		j.touched = true
	}
}

// reset notes that the GPU was reset after a time.
func (j *judge) reset(g *gpuHistory, began time.Time) {
	j.touched = true
	// The times of what counts only when it lasts begin anew.
	clear(g.since)
	for _, f := range g.Faults {
		// A reset also ends faults that end by themselves.
		if f.Ending != whenRead && f.Last.Before(began) && f.Gone.IsZero() {
			f.Gone = began
		}
	}
}

// settle removes the faults that are over by now. It must be called again and again.
func (j *judge) settle(pciAddress string, quiet time.Duration, now time.Time) {
	g := j.of(pciAddress)
	j.drop(g, func(f *fault) bool {
		if end := g.end(f, quiet); now.Before(end) {
			if !f.Gone.IsZero() && !f.held {
				f.held = true
				j.held = append(j.held, Hold{PCIAddress: pciAddress, Reason: f.Reason, Earlier: g.earlier(f), Until: end})
			}
			return false
		}
		if f.Partition == nil && countable(f.Reason) {
			j.count(g, f, now)
		}
		return true
	})
	before := len(g.Past)
	g.Past = slices.DeleteFunc(g.Past, func(p *past) bool { return now.Sub(p.Ended) > remember })
	j.touched = j.touched || len(g.Past) != before
}

// never is the end of what nothing ends.
var never = time.Unix(1<<40, 0)

// end returns when a fault is over, if nothing else happens.
func (g *gpuHistory) end(f *fault, quiet time.Duration) time.Time {
	earlier := g.earlier(f)
	// A fault that is proved to be over does not hold the GPU back the first time.
	hold := time.Duration(0)
	if earlier > 0 {
		hold = longer(quiet, earlier-1)
	}
	switch {
	case !f.Gone.IsZero():
		return later(f.Gone, f.Last.Add(hold))
	case f.Ending == whenQuiet:
		return f.Last.Add(longer(quiet, earlier))
	case f.Ending == afterReset && !g.NoActionSince.IsZero():
		// The driver knows best: it has asked for no reset all that time.
		if end := later(f.Last, g.NoActionSince).Add(longer(quiet, earlier)); !g.AskedAt.Before(end) {
			return end
		}
	}
	return never
}

// longer doubles a time some times, up to longestHold.
func longer(d time.Duration, times int) time.Duration {
	for range min(times, mostDoublings) {
		d = min(2*d, max(d, longestHold))
	}
	return d
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// countable reports whether a GPU is held back for longer if a fault comes again. A fault without
// effect on claims by default, which each reading shows anew, is not.
func countable(reason device.Reason) bool {
	return reason != device.Throttled && reason != device.Unmonitored && reason != device.RowRemapPending
}

// earlier returns how often the GPU had the fault before.
func (g *gpuHistory) earlier(f *fault) int {
	for _, p := range g.Past {
		if p.Reason == f.Reason && p.XID == f.XID && f.Partition == nil {
			return p.Count
		}
	}
	return 0
}

func (j *judge) count(g *gpuHistory, f *fault, at time.Time) {
	if f.Partition != nil || !countable(f.Reason) {
		return
	}
	for _, p := range g.Past {
		if p.Reason == f.Reason && p.XID == f.XID {
			p.Count, p.Ended = p.Count+1, at
			return
		}
	}
	g.Past = append(g.Past, &past{Reason: f.Reason, XID: f.XID, Count: 1, Ended: at})
}

// conditions returns the conditions of all GPUs.
func (j *judge) conditions(h *policy.Health) []device.Condition {
	var all []device.Condition
	for _, address := range gpu.SortPCIAddresses(slices.Collect(maps.Keys(j.gpus))) {
		g := j.gpus[address]
		for _, f := range slices.SortedFunc(slices.Values(g.Faults), compareFaults) {
			if c, counts := f.condition(address, h, g.verdict(f)); counts {
				all = append(all, c)
			}
		}
	}
	return all
}

func compareFaults(a, b *fault) int {
	return cmp.Or(a.First.Compare(b.First), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.XID, b.XID))
}
