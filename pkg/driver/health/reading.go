// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// reading is what was read of a GPU.
type reading struct {
	// Began and Ended are when. What was read is proof of nothing that happened after Began.
	Began, Ended time.Time
	Health       gpu.Health
	// Err says that parts of Health, or all, could not be read.
	Err error
	// Unmonitored is why the events of the GPU are not received, or nil.
	Unmonitored error
	// FabricNotAsked says that the driver was not asked for the state of the fabric.
	FabricNotAsked bool
}

// silent reports whether nothing was read, and no more is known than that it failed: a GPU that
// fell off the bus may say that it is lost, and then fail in unknown ways.
func (now *reading) silent() bool {
	return now.Err != nil && failure(now.Err) == "" && reflect.ValueOf(now.Health).IsZero()
}

// read takes a reading.
func (j *judge) read(pciAddress string, now reading) {
	r := j.gpus[pciAddress]
	if r == nil {
		return
	}
	defer j.weigh(r)
	if errors.Is(now.Err, gpu.ErrDriverNotLoaded) || errors.Is(now.Err, gpu.ErrVersionMismatch) {
		// That is nothing to say of a single GPU. When it is loaded again, the driver starts
		// all of them anew; that this mends what a reset does is assumed.
		r.Absent = r.Absent || r.answered
		return
	}
	if now.silent() {
		return
	}
	found := faultsOf(now)
	answers := !slices.ContainsFunc(found, func(f *fault) bool { return isFailure(f.Reason) })
	if answers && (r.Absent || r.recovered(now.Health) || less(now.Health.UncorrectedECC, r.Uncorrected)) {
		j.reset(r, now.Began)
	}
	if less(r.Uncorrected, now.Health.UncorrectedECC) && !r.has(device.UncorrectedECC) {
		found = append(found, uncorrected())
	}
	for _, f := range r.persistent(found, now) {
		j.see(r, f, now.Ended)
	}
	j.clear(r, found, now)
	r.keep(now, answers)
}

// verdict is what the driver says of an XID. Only an answer says anything: one that does not come
// changes nothing. Neither does what is wanted after a reset say anything of what was before it, and
// what is only held back evicts nobody.
func (r *record) verdict(f *fault) verdict {
	switch {
	case r.Asked.IsZero() || !f.Gone.IsZero():
		return verdictDue
	case r.Wants == "" || r.has(device.Lost) || r.has(device.ResetRequired):
		return verdictTable
	case r.Wants == gpu.RecoveryNone && !f.Last.After(r.Asked):
		return verdictHarmless
	case r.Wants != gpu.RecoveryNone && !f.First.After(r.Asked):
		return verdictTable
	}
	return verdictDue
}

// weigh notes that verdicts have changed.
func (j *judge) weigh(r *record) {
	for _, f := range r.Faults {
		if v := r.verdict(f); f.Reason == device.XID && f.verdict != v {
			f.verdict, j.changed, j.touched = v, true, true
		}
	}
}

// clear notes which faults a reading proves to be gone.
func (j *judge) clear(r *record, found []*fault, now reading) {
	for _, f := range r.Faults {
		still := slices.ContainsFunc(found, func(is *fault) bool { return is.identity() == f.identity() })
		calm := time.Nanosecond
		if f.Reason == device.Throttled {
			calm = patience // a GPU at its limit is hot every other moment
		}
		if f.Ending == whenRead && !still && now.Began.Sub(f.Last) >= calm && f.Gone.IsZero() && now.asked(f.Reason) {
			f.Gone, j.touched = now.Began, true
		}
	}
}

// asked reports whether a reading would have something that is wrong. A GPU that hangs proves
// nothing, and one that answers in part only that it answers.
func (now *reading) asked(reason device.Reason) bool {
	switch {
	case isFailure(reason):
		return !errors.Is(now.Err, gpu.ErrHung)
	case reason == device.FabricUnhealthy && now.FabricNotAsked:
		return false
	}
	return now.Err == nil
}

// keep remembers what the next reading is compared with.
func (r *record) keep(now reading, answers bool) {
	if !answers {
		r.Absent = r.Absent || !errors.Is(now.Err, gpu.ErrHung)
		r.Content = time.Time{}
		return
	}
	r.answered, r.Absent = true, false
	r.hear(now)
	if now.Health.UncorrectedECC != nil {
		r.Uncorrected = now.Health.UncorrectedECC
	}
}

// hear remembers what the driver wants. One that does not say has no recovery actions, unless parts
// of the reading failed or it had one before.
func (r *record) hear(now reading) {
	action := now.Health.RecoveryAction
	if action == "" && (now.Err != nil || r.Wants != "") {
		return
	}
	r.Wants, r.Asked = action, now.Began
	switch {
	case action != gpu.RecoveryNone:
		r.Content = time.Time{}
	case r.Content.IsZero():
		r.Content = now.Ended
	}
}

// recovered reports whether what the driver wanted to be done was done.
func (r *record) recovered(now gpu.Health) bool {
	wanted := r.Wants != "" && r.Wants != gpu.RecoveryNone
	return wanted && now.RecoveryAction == gpu.RecoveryNone
}

func (r *record) has(reason device.Reason) bool {
	return slices.ContainsFunc(r.Faults, func(f *fault) bool { return f.Reason == reason && f.Gone.IsZero() })
}

func less(now, before *uint64) bool { return now != nil && before != nil && *now < *before }

// isFailure reports whether a reason is about the GPU's not answering. A GPU that answers in
// another way has none of the others.
func isFailure(reason device.Reason) bool {
	return reason == device.Lost || reason == device.ResetRequired || reason == device.Unresponsive
}

// persistent leaves out what has not persisted for long enough. What was not asked about persists.
func (r *record) persistent(found []*fault, now reading) []*fault {
	maps.DeleteFunc(r.since, func(reason device.Reason, _ time.Time) bool {
		still := slices.ContainsFunc(found, func(f *fault) bool { return f.patient && f.Reason == reason })
		return !still && now.asked(reason)
	})
	return slices.DeleteFunc(slices.Clone(found), func(f *fault) bool {
		if !f.patient {
			return false
		}
		if r.since == nil {
			r.since = map[device.Reason]time.Time{}
		}
		if _, known := r.since[f.Reason]; !known {
			r.since[f.Reason] = now.Ended
		}
		return now.Ended.Sub(r.since[f.Reason]) < patience && !r.has(f.Reason)
	})
}

// watchesFabric reports whether something is known of the fabric that a reading may end.
func (j *judge) watchesFabric(pciAddress string) bool {
	r := j.gpus[pciAddress]
	if r == nil {
		return false
	}
	_, pending := r.since[device.FabricUnhealthy]
	return pending || r.has(device.FabricUnhealthy)
}

// faultsOf says what a reading has. Of a GPU that does not answer nothing else is known.
func faultsOf(now reading) []*fault {
	if reason := failure(now.Err); reason != "" {
		// Each value that could not be read has a line.
		text, _, _ := strings.Cut(now.Err.Error(), "\n")
		return []*fault{{Reason: reason, Ending: whenRead, Detail: text}}
	}
	found := faultsOfHealth(now.Health)
	if now.Unmonitored != nil && !errors.Is(now.Unmonitored, gpu.ErrLost) && !errors.Is(now.Unmonitored, gpu.ErrResetRequired) {
		found = append(found, &fault{
			Reason: device.Unmonitored, Ending: whenRead, Detail: "its errors are not reported: " + now.Unmonitored.Error(),
		})
	}
	return found
}

// failure is how a GPU fails to answer, or empty.
func failure(err error) device.Reason {
	switch {
	case errors.Is(err, gpu.ErrLost), errors.Is(err, gpu.ErrNotFound):
		return device.Lost
	case errors.Is(err, gpu.ErrResetRequired):
		return device.ResetRequired
	case errors.Is(err, gpu.ErrHung):
		return device.Unresponsive
	}
	return ""
}

func faultsOfHealth(h gpu.Health) []*fault {
	var found []*fault
	add := func(on bool, reason device.Reason, value, detail string) {
		if on {
			found = append(found, &fault{Reason: reason, Value: value, Ending: whenRead, Detail: detail})
		}
	}
	lasts := func(on bool, reason device.Reason, detail string) {
		if on {
			found = append(found, &fault{Reason: reason, Ending: whenRead, Detail: detail, patient: true})
		}
	}
	action := h.RecoveryAction
	add(action != "" && action != gpu.RecoveryNone, device.RecoveryRequired, labelValue(string(action)),
		fmt.Sprintf("the driver wants this to be done: %s", action))
	add(h.RowRemapFailed, device.RowRemapFailed, "", "a broken row of memory could not be replaced")
	add(h.RepairPending, device.RowRemapPending, "",
		"broken memory will be replaced, retired or repaired at the next reset")
	add(h.Unrepairable, device.MemoryUnrepairable, "", "memory is broken and cannot be repaired")
	add(h.FabricUnhealthy != "", device.FabricUnhealthy, "", "the connection to the NVLink fabric is not in order: "+h.FabricUnhealthy)
	lasts(h.FabricPending != "", device.FabricUnhealthy, "it is not registered with the NVLink fabric ("+h.FabricPending+
		"), and CUDA programs do not start before that: is the fabric manager running, in the driver's version")
	var why []string
	for _, t := range h.Throttling {
		why = append(why, string(t))
	}
	lasts(len(why) > 0, device.Throttled, "its clocks are lowered: "+strings.Join(why, ", "))
	return found
}

// labelValue makes "drain-and-reset" of "Drain and Reset".
func labelValue(text string) string { return strings.ToLower(strings.ReplaceAll(text, " ", "-")) }
