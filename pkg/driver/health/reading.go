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
	// Began and Ended are its times. It proves nothing about what happened after Began.
	Began, Ended time.Time
	Health       gpu.Health
	// Err says that parts of Health, or all, could not be read.
	Err error
	// Unmonitored is why the events of the GPU are not received, or nil.
	Unmonitored error
	// FabricNotAsked says that the driver was not asked for the state of the fabric.
	FabricNotAsked bool
}

// silent reports whether nothing was read, with an error that says nothing about the GPU: after a GPU
// fell off the bus, the driver may say that it is lost, and later return other errors.
func (now *reading) silent() bool {
	return now.Err != nil && failure(now.Err) == "" && reflect.ValueOf(now.Health).IsZero()
}

// read takes a reading.
func (j *judge) read(pciAddress string, now reading) {
	g := j.of(pciAddress)
	if errors.Is(now.Err, gpu.ErrDriverNotLoaded) || errors.Is(now.Err, gpu.ErrVersionMismatch) {
		// That says nothing about a single GPU. When the driver is loaded again, it initializes
		// all of them; it is assumed that this ends the same faults as a reset.
		g.Absent = g.Absent || g.answered
		return
	}
	if now.silent() {
		return
	}
	found := faultsOf(now)
	answers := !slices.ContainsFunc(found, func(f *fault) bool { return f.Reason.IsFailure() })
	if answers && (g.Absent || g.recovered(now.Health) || less(now.Health.UncorrectedECC, g.Uncorrected)) {
		j.reset(g, now.Began)
	}
	if less(g.Uncorrected, now.Health.UncorrectedECC) && !g.has(device.UncorrectedECC) {
		found = append(found, uncorrected())
	}
	for _, f := range g.persistent(found, now) {
		j.see(g, f, now.Ended)
	}
	j.clear(g, found, now)
	g.keep(now, answers)
}

// verdict says what follows from the driver's last answer for an XID. Without an answer nothing changes.
// An answer from after a reset says nothing about faults before it, and a fault that only holds the GPU
// back evicts nobody.
func (g *gpuHistory) verdict(f *fault) verdict {
	switch {
	case g.AskedAt.IsZero() || !f.Gone.IsZero():
		return verdictDue
	case g.Wants == "" || g.has(device.Lost) || g.has(device.ResetRequired):
		return verdictTable
	case g.Wants == gpu.RecoveryNone && !f.Last.After(g.AskedAt):
		return verdictHarmless
	case g.Wants != gpu.RecoveryNone && !f.First.After(g.AskedAt):
		return verdictTable
	}
	return verdictDue
}

// clear notes which faults are over, by the proof of a reading.
func (j *judge) clear(g *gpuHistory, found []*fault, now reading) {
	for _, f := range g.Faults {
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

// asked reports whether a reading would show such a fault if there were one. A GPU that hangs proves
// nothing, and one that answers in part proves only that it answers.
func (now *reading) asked(reason device.Reason) bool {
	switch {
	case reason.IsFailure():
		return !errors.Is(now.Err, gpu.ErrHung)
	case reason == device.FabricUnhealthy && now.FabricNotAsked:
		return false
	}
	return now.Err == nil
}

// keep stores what the next reading is compared with.
func (g *gpuHistory) keep(now reading, answers bool) {
	if !answers {
		g.Absent = g.Absent || !errors.Is(now.Err, gpu.ErrHung)
		g.NoActionSince = time.Time{}
		return
	}
	g.answered, g.Absent = true, false
	g.noteRecoveryAction(now)
	if now.Health.UncorrectedECC != nil {
		g.Uncorrected = now.Health.UncorrectedECC
	}
}

// noteRecoveryAction stores the recovery action that the driver asks for. A driver that returns none knows
// no recovery actions, unless parts of the reading failed, or it has returned one before.
func (g *gpuHistory) noteRecoveryAction(now reading) {
	action := now.Health.RecoveryAction
	if action == "" && (now.Err != nil || g.Wants != "") {
		return
	}
	g.Wants, g.AskedAt = action, now.Began
	switch {
	case action != gpu.RecoveryNone:
		g.NoActionSince = time.Time{}
	case g.NoActionSince.IsZero():
		g.NoActionSince = now.Ended
	}
}

// recovered reports whether the recovery action that the driver asked for was carried out.
func (g *gpuHistory) recovered(now gpu.Health) bool {
	wanted := g.Wants != "" && g.Wants != gpu.RecoveryNone
	return wanted && now.RecoveryAction == gpu.RecoveryNone
}

func (g *gpuHistory) has(reason device.Reason) bool {
	return slices.ContainsFunc(g.Faults, func(f *fault) bool { return f.Reason == reason && f.Gone.IsZero() })
}

func less(now, before *uint64) bool { return now != nil && before != nil && *now < *before }

// persistent leaves out what has not lasted long enough. What was not asked for counts as lasting.
func (g *gpuHistory) persistent(found []*fault, now reading) []*fault {
	maps.DeleteFunc(g.since, func(reason device.Reason, _ time.Time) bool {
		still := slices.ContainsFunc(found, func(f *fault) bool { return f.patient && f.Reason == reason })
		return !still && now.asked(reason)
	})
	return slices.DeleteFunc(slices.Clone(found), func(f *fault) bool {
		if !f.patient {
			return false
		}
		if g.since == nil {
			g.since = map[device.Reason]time.Time{}
		}
		if _, known := g.since[f.Reason]; !known {
			g.since[f.Reason] = now.Ended
		}
		return now.Ended.Sub(g.since[f.Reason]) < patience && !g.has(f.Reason)
	})
}

// watchesFabric reports whether there is a fault of the fabric, or one that may become a fault.
func (j *judge) watchesFabric(pciAddress string) bool {
	g := j.of(pciAddress)
	_, pending := g.since[device.FabricUnhealthy]
	return pending || g.has(device.FabricUnhealthy)
}

// faultsOf returns the faults that a reading shows. If the GPU does not answer, that is the only one.
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

// failure is the reason why a GPU does not answer, or empty.
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
