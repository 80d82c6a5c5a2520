// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"maps"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// Pace has the times that only say when.
type Pace struct {
	// TellLatest is after what time a taint without effect is written by itself, and TellOnce how often at most for a slice.
	TellLatest, TellOnce Time
	// Hold is how long a taint stays that nobody wants any more when it has come back for the first time, and HoldMost at most.
	// One that has come for the first time in HoldForgotten goes at once.
	Hold, HoldMost, HoldForgotten Time
	// Repair is the time before what others have changed is put back for the second time, and RepairMost at most. Others must
	// have changed nothing for RepairForgotten, so that it is done at once again.
	Repair, RepairMost, RepairForgotten Time
	// Retry is the time before a write that has failed is tried again, and RetryMost at most.
	Retry, RetryMost Time
	// Relist is the least time between two lists.
	Relist Time
	// Burst is how many writes that can wait are made at once, and Every the time until there is one more.
	Burst int
	Every Time
}

// Usual is the pace of the driver.
var Usual = Pace{
	TellLatest: 5 * time.Minute, TellOnce: 10 * time.Minute,
	Hold: 5 * time.Second, HoldMost: 20 * time.Second, HoldForgotten: 10 * time.Minute,
	Repair: time.Second, RepairMost: 5 * time.Minute, RepairForgotten: 10 * time.Minute,
	Retry: time.Second, RetryMost: 20 * time.Second,
	Relist: time.Second,
	Burst:  60, Every: 30 * time.Second,
}

type taintKey struct{ device, key string }

// wantedTaint is one that keeps pods away.
type wantedTaint struct {
	taintKey
	effect resourceapi.DeviceTaintEffect
}

// written is what was answered last when a slice was written.
type written struct {
	version string
	news    Time
}

// flapping is how often a taint has come back.
type flapping struct {
	goneAt, hold Time
}

// Memory is what Decide remembers for pace. With a new one the same is written, perhaps at another time. It is for one goroutine.
type Memory struct {
	// doubt asks for a list, and listAt is when the next one may be.
	doubt  bool
	listAt Time
	// said is when a taint was first wanted that keeps pods away, untold when one without effect was first missing, and unwanted
	// when one that is stored was first not wanted any more.
	said             map[wantedTaint]Time
	untold, unwanted map[taintKey]Time
	flaps            map[taintKey]flapping
	// wrote and toldAt are by the names of slices: their last answers, and when taints without effect were written.
	wrote  map[string]written
	toldAt map[string]Time
	// repairing is what others have changed, repaired something of it was put back.
	repairing, repaired               bool
	repairDelay, repairAt, repairedAt Time
	// triedAt is when the last request was answered, or not.
	retryDelay, retryAt, triedAt Time
	// outdated is how many writes in a row were refused because something else is stored than was known.
	outdated int
	// tokens are the writes that can be made, and tokenAt is when the last one was earned.
	tokens  int
	tokenAt Time
}

// NewMemory is that of a process that begins.
func NewMemory(p *Pace, now Time) *Memory {
	return &Memory{
		doubt: true, listAt: Never, said: map[wantedTaint]Time{}, untold: map[taintKey]Time{}, unwanted: map[taintKey]Time{}, flaps: map[taintKey]flapping{},
		wrote: map[string]written{}, toldAt: map[string]Time{}, repairAt: Never, repairedAt: Never, retryAt: Never, triedAt: Never,
		tokens: p.Burst, tokenAt: now,
	}
}

// say notes since when taints are wanted that keep pods away, and how often one has come back.
func (m *Memory) say(all []slot, p *Pace, now Time) {
	said := map[wantedTaint]Time{}
	for i := range all {
		s := &all[i]
		for _, device := range s.want.Spec.Devices {
			for _, t := range device.Taints {
				if !keepsAway(t.Effect) {
					continue
				}
				k := wantedTaint{taintKey{device.Name, t.Key}, t.Effect}
				since, known := m.said[k]
				if !known {
					since = now
					m.comesBack(k.taintKey, p)
				}
				said[k], s.news = since, max(s.news, since)
			}
		}
	}
	for k := range m.said {
		if _, still := said[k]; !still {
			m.flaps[k.taintKey] = flapping{goneAt: now, hold: m.flaps[k.taintKey].hold}
		}
	}
	maps.DeleteFunc(m.flaps, func(_ taintKey, f flapping) bool { return now-f.goneAt > p.HoldForgotten })
	m.said = said
}

// comesBack has a taint stay longer the next time, if it was there not long ago.
func (m *Memory) comesBack(k taintKey, p *Pace) {
	if f, known := m.flaps[k]; known {
		f.hold = min(max(p.Hold, 2*f.hold), p.HoldMost)
		m.flaps[k] = f
	}
}

// told is when taints without effect of a slice were written last.
func (m *Memory) told(name string) Time {
	if at, known := m.toldAt[name]; known {
		return at
	}
	return Never
}

// knew is when the latest taint was wanted of a slice that was written.
func (m *Memory) knew(name string) Time {
	if w, known := m.wrote[name]; known {
		return w.news
	}
	return Never
}

// earn brings the budget up to date.
func (m *Memory) earn(p *Pace, now Time) {
	if earned := int((now - m.tokenAt) / p.Every); earned > 0 {
		m.tokens, m.tokenAt = min(m.tokens+earned, p.Burst), m.tokenAt+Time(earned)*p.Every
	}
	if m.tokens >= p.Burst {
		m.tokenAt = now
	}
}

// repairs notes whether others have changed something that is not put right yet.
func (m *Memory) repairs(differs bool, p *Pace, now Time) {
	switch {
	case differs && !m.repairing:
		if now-m.repairedAt > p.RepairForgotten+m.repairDelay {
			m.repairDelay = 0
		}
		m.repairing, m.repaired, m.repairAt = true, false, now+m.repairDelay
	case !differs && m.repairing:
		m.endRepairs(p, now)
	}
}

func (m *Memory) endRepairs(p *Pace, now Time) {
	m.repairing, m.repaired, m.repairedAt = false, false, now
	m.repairDelay = min(max(p.Repair, 2*m.repairDelay), p.RepairMost)
}

// Doubt has the slices read: something else may be stored than is known.
func (m *Memory) Doubt() { m.doubt = true }

// Registered is called when the kubelet has registered the plugin: what it has deleted comes back at once.
func (m *Memory) Registered(now Time) {
	m.repairing, m.repaired, m.repairDelay, m.repairAt = false, false, 0, Never
	m.doubt, m.listAt, m.retryAt = true, now, Never
}

// Listed takes note that the slices were read. Who changes something again after a repair is answered more slowly.
func (m *Memory) Listed(p *Pace, now Time) {
	if m.repairing && m.repaired {
		m.endRepairs(p, now)
	}
	m.doubt, m.listAt = false, now+p.Relist
	m.answered(now)
}

// Wrote takes the version that was answered to a write.
func (m *Memory) Wrote(w *Write, version string, now Time) {
	m.wrote[w.Slice.Name] = written{version, w.News}
	m.repaired = m.repaired || m.repairing
	if w.tells {
		m.toldAt[w.Slice.Name] = now
	}
	// What cannot wait may be in debt, for which the rest waits.
	if w.spends {
		m.tokens = max(m.tokens-1, -debt)
	}
	m.outdated = 0
	m.answered(now)
}

// Changed takes note that something else was stored than was sent: that is a change by others.
func (m *Memory) Changed(p *Pace, w *Write, now Time) {
	m.wrote[w.Slice.Name] = written{"", m.knew(w.Slice.Name)}
	if m.repairing {
		m.endRepairs(p, now)
	}
	m.outdated = 0
}

// debt is how many writes the budget can be short of.
const debt = 10

// Deleted takes note that a slice was deleted, or is not there.
func (m *Memory) Deleted(name string, now Time) {
	delete(m.wrote, name)
	m.outdated = 0
	m.answered(now)
}

func (m *Memory) answered(now Time) { m.triedAt, m.retryDelay, m.retryAt = now, 0, Never }

// Refused takes note that a request has failed. jitter is between 0 and 1.
func (m *Memory) Refused(p *Pace, now Time, jitter float64) {
	m.retryDelay = min(max(p.Retry, m.retryDelay*3/2), p.RetryMost)
	m.triedAt, m.retryAt = now, now+m.retryDelay+Time(jitter*float64(m.retryDelay)/2)
}

// RetryAt is when a request may be tried again after one has failed.
func (m *Memory) RetryAt() Time { return m.retryAt }

// Outdated takes note that a write was refused because something else is stored than was known. If that does not help it is
// read ever more rarely: the name of a slice may be taken.
func (m *Memory) Outdated(p *Pace, now Time) {
	m.triedAt, m.doubt = now, true
	if m.outdated++; m.outdated > 1 {
		m.listAt = now + min(p.Retry<<min(m.outdated, 10), p.RetryMost)
	}
}
