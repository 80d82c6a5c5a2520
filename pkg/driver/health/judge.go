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
	// mostDoublings and longestHold bound how long a GPU that fails again and again is held
	// back after it works again: for 128 quiet periods, or a day.
	mostDoublings = 7
	longestHold   = 24 * time.Hour
	// remember is for how long an earlier failure counts.
	remember = 7 * 24 * time.Hour
	// writeEvery is how often it is written down that a fault lasts.
	writeEvery = time.Minute
	// patience is for how long something must last that comes and goes in normal operation.
	patience = time.Minute
)

// Place is a partition at the time of an event.
type Place struct {
	// UUID is the MIG device's. No other partition ever has the same.
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
	// whenQuiet and afterReset are those of XIDs; whenRead is when a reading no longer has
	// it.
	whenQuiet  = ending(xid.Quiet)
	afterReset = ending(xid.Reset)
	whenRead   = ending("reading")
)

// verdict is whether an XID needs anything to be done. The driver knows better than a table of
// numbers.
type verdict string

const (
	// verdictTable means that the table counts: the driver has no recovery actions, or wants one,
	// which is a condition of its own, or the GPU is lost.
	verdictTable verdict = ""
	// verdictDue means that the driver has not answered since: nobody is evicted.
	verdictDue verdict = "due"
	// verdictHarmless means that the driver wants nothing to be done.
	verdictHarmless verdict = "harmless"
)

// fault is something that is wrong with a GPU, or with one partition of it.
type fault struct {
	Reason device.Reason `json:"reason"`
	// XID is the number for the reason XID.
	XID uint64 `json:"xid,omitempty"`
	// Value is that of the taint.
	Value string `json:"value,omitempty"`
	// Partition is nil for all of the GPU.
	Partition *Place `json:"partition,omitempty"`
	// Unplaced says that it is of one partition, and not known of which.
	Unplaced bool   `json:"unplaced,omitempty"`
	Ending   ending `json:"ending"`
	// Detail is what is wrong, for people.
	Detail string `json:"detail"`
	// First and Last are when it was seen.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	// Gone is since when it is proved that it is over. It is then held back.
	Gone time.Time `json:"gone,omitzero"`

	// patient says that it counts only when it has lasted for a while.
	patient bool
	// held says that it was told that it is held back.
	held bool
	// verdict is the one that was told last.
	verdict verdict
	// written is the Last that was asked to be written down.
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

// record is what is known of one GPU.
type record struct {
	// UUID is the GPU's. Another one in the same place starts anew.
	UUID   string   `json:"uuid"`
	Faults []*fault `json:"faults,omitempty"`
	Past   []*past  `json:"past,omitempty"`
	// Absent says that the last reading has found that the GPU works only after a reset.
	Absent bool `json:"absent,omitempty"`
	// Wants is the recovery action that the driver wanted when it was Asked, and Content since when it
	// has wanted none. Where Asked is set and both others are empty, the driver knows no recovery actions.
	Wants   gpu.RecoveryAction `json:"wants,omitempty"`
	Asked   time.Time          `json:"asked,omitzero"`
	Content time.Time          `json:"content,omitzero"`
	// Uncorrected counts memory errors as of the last reading. A reset sets it to 0.
	Uncorrected *uint64 `json:"uncorrected,omitempty"`

	// answered says that this process has had a reading, and since when readings have had what
	// counts only when it lasts.
	answered bool
	since    map[device.Reason]time.Time
}

// judge decides what is wrong. It is for one goroutine at a time.
type judge struct {
	gpus map[string]*record
	// changed says that something started or ended since it was last set to false, and
	// touched that anything is different.
	changed, touched bool
	// held are those that were not told of yet.
	held []Hold
}

func newJudge() *judge { return &judge{gpus: map[string]*record{}} }

// follow says which GPU is at an address.
func (j *judge) follow(pciAddress, uuid string) {
	if r := j.gpus[pciAddress]; r == nil || r.UUID != uuid {
		j.changed = j.changed || r != nil && len(r.Faults) > 0
		j.touched = true
		j.gpus[pciAddress] = &record{UUID: uuid}
	}
}

// event takes an event, and returns what the XID means if it is one. The place is nil where
// all of the GPU is affected, or a partition that is not known. An XID that is ignored under the
// policy is no fault.
func (j *judge) event(e gpu.Event, at *Place, h *policy.Health) (x xid.XID) {
	r := j.gpus[e.PCIAddress]
	if r == nil {
		return xid.XID{}
	}
	defer j.weigh(r)
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
		j.see(r, f, e.Time)
	case gpu.EventUncorrectedECC:
		f := uncorrected()
		f.put(e, at)
		j.see(r, f, e.Time)
	case gpu.EventLost:
		j.see(r, &fault{Reason: device.Lost, Ending: whenRead, Detail: "the driver reports that it is lost"}, e.Time)
	case gpu.EventReset:
		j.reset(r, e.Time)
	}
	return x
}

// put says where a fault is that may be of one partition only.
func (f *fault) put(e gpu.Event, at *Place) {
	f.Partition, f.Unplaced = at, at == nil && e.InstanceID >= 0
	if f.Unplaced {
		f.Detail += " on a partition that is not known"
	}
}

func uncorrected() *fault {
	return &fault{Reason: device.UncorrectedECC, Ending: whenQuiet, Detail: "memory had an error that ECC could not correct"}
}

// see notes that something is wrong. What is known already lasts longer.
func (j *judge) see(r *record, found *fault, at time.Time) {
	known := slices.IndexFunc(r.Faults, func(f *fault) bool { return f.identity() == found.identity() })
	if known < 0 {
		found.First, found.Last, found.written = at, at, at
		r.Faults = append(r.Faults, found)
		j.changed, j.touched = true, true
		return
	}
	f := r.Faults[known]
	if !f.Gone.IsZero() {
		// It did not stay away while it was held back.
		j.count(r, f, at)
		j.changed, j.touched = true, true
	}
	if at.After(f.Last) {
		f.Last = at
	}
	if f.Last.Sub(f.written) >= writeEvery {
		f.written, j.touched = f.Last, true
	}
	f.Gone, f.held, f.Detail = time.Time{}, false, found.Detail
	if f.Value != found.Value {
		f.Value, j.changed = found.Value, true
	}
}

// alive ends what was wrong with partitions that are not there any more. The reading of them
// began at a time.
func (j *judge) alive(pciAddress string, instances []gpu.Instance, began time.Time) {
	r := j.gpus[pciAddress]
	if r == nil {
		return
	}
	j.drop(r, func(f *fault) bool {
		return f.Partition != nil && f.Last.Before(began) && !gpu.HasMIGDevice(instances, f.Partition.UUID)
	})
}

// hasPartitionFaults reports whether alive may end something.
func (j *judge) hasPartitionFaults(pciAddress string) bool {
	r := j.gpus[pciAddress]
	return r != nil && slices.ContainsFunc(r.Faults, func(f *fault) bool { return f.Partition != nil })
}

func (j *judge) drop(r *record, over func(*fault) bool) {
	before := len(r.Faults)
	if r.Faults = slices.DeleteFunc(r.Faults, over); len(r.Faults) != before {
		j.changed, j.touched = true, true
	}
}

// reset notes that the GPU was reset after a time.
func (j *judge) reset(r *record, began time.Time) {
	j.touched = true
	// What takes its time begins anew.
	clear(r.since)
	for _, f := range r.Faults {
		// A reset ends what heals by itself, too.
		if f.Ending != whenRead && f.Last.Before(began) && f.Gone.IsZero() {
			f.Gone = began
		}
	}
}

// settle ends what is over by now. It must be called again and again.
func (j *judge) settle(pciAddress string, quiet time.Duration, now time.Time) {
	r := j.gpus[pciAddress]
	if r == nil {
		return
	}
	j.drop(r, func(f *fault) bool {
		if end := r.end(f, quiet); now.Before(end) {
			if !f.Gone.IsZero() && !f.held {
				f.held = true
				j.held = append(j.held, Hold{PCIAddress: pciAddress, Reason: f.Reason, Earlier: r.earlier(f), Until: end})
			}
			return false
		}
		if f.Partition == nil && countable(f.Reason) {
			j.count(r, f, now)
		}
		return true
	})
	before := len(r.Past)
	r.Past = slices.DeleteFunc(r.Past, func(p *past) bool { return now.Sub(p.Ended) > remember })
	j.touched = j.touched || len(r.Past) != before
}

// never is after all times.
var never = time.Unix(1<<40, 0)

// end returns when a fault is over as things are.
func (r *record) end(f *fault, quiet time.Duration) time.Time {
	earlier := r.earlier(f)
	// For what is proved to be over there is no waiting the first time.
	hold := time.Duration(0)
	if earlier > 0 {
		hold = longer(quiet, earlier-1)
	}
	switch {
	case !f.Gone.IsZero():
		return later(f.Gone, f.Last.Add(hold))
	case f.Ending == whenQuiet:
		return f.Last.Add(longer(quiet, earlier))
	case f.Ending == afterReset && !r.Content.IsZero():
		// The driver, who knows best, wants no reset, and says so until then.
		if end := later(f.Last, r.Content).Add(longer(quiet, earlier)); !r.Asked.Before(end) {
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

// countable reports whether a fault that comes again is held back for longer. What changes
// nothing for claims by default, and is read again at any time, is not.
func countable(reason device.Reason) bool {
	return reason != device.Throttled && reason != device.Unmonitored && reason != device.RowRemapPending
}

// earlier is how often the GPU had the fault before.
func (r *record) earlier(f *fault) int {
	for _, p := range r.Past {
		if p.Reason == f.Reason && p.XID == f.XID && f.Partition == nil {
			return p.Count
		}
	}
	return 0
}

func (j *judge) count(r *record, f *fault, at time.Time) {
	if f.Partition != nil || !countable(f.Reason) {
		return
	}
	for _, p := range r.Past {
		if p.Reason == f.Reason && p.XID == f.XID {
			p.Count, p.Ended = p.Count+1, at
			return
		}
	}
	r.Past = append(r.Past, &past{Reason: f.Reason, XID: f.XID, Count: 1, Ended: at})
}

// conditions are what is wrong with all GPUs.
func (j *judge) conditions(h *policy.Health) []device.Condition {
	var all []device.Condition
	for _, address := range gpu.SortPCIAddresses(slices.Collect(maps.Keys(j.gpus))) {
		r := j.gpus[address]
		for _, f := range slices.SortedFunc(slices.Values(r.Faults), compareFaults) {
			if c, counts := f.condition(address, h, r.verdict(f)); counts {
				all = append(all, c)
			}
		}
	}
	return all
}

func compareFaults(a, b *fault) int {
	return cmp.Or(a.First.Compare(b.First), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.XID, b.XID))
}
