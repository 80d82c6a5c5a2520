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
	// InformLatest is after what time a taint without effect is written by itself, and InformOnce how often at most for a slice.
	InformLatest, InformOnce Time
	// Hold is how long a taint stays after its cause has ended, if it had ended before within HoldForgotten. The first time it goes at once.
	Hold, HoldForgotten Time
	// Repair is the time before what others have changed is put back for the second time, and RepairMost at most. Others must
	// have changed nothing for RepairForgotten, so that it is done at once again.
	Repair, RepairMost, RepairForgotten Time
	// Retry is the time before a request that has failed is tried again, and RetryMost at most.
	Retry, RetryMost Time
	// Burst is how many writes that can wait are made at once, and Every the time until there is one more.
	Burst int
	Every Time
}

// Usual is the pace of the driver.
var Usual = Pace{
	InformLatest: 5 * time.Minute, InformOnce: 10 * time.Minute,
	Hold: 20 * time.Second, HoldForgotten: 10 * time.Minute,
	Repair: time.Second, RepairMost: 5 * time.Minute, RepairForgotten: 10 * time.Minute,
	Retry: time.Second, RetryMost: 20 * time.Second,
	Burst: 60, Every: 30 * time.Second,
}

// debt is how many writes the budget can be short of.
const debt = 10

type taintKey struct{ device, key string }

type wantedTaint struct {
	taintKey
	effect resourceapi.DeviceTaintEffect
}

// ending is when a taint was last not wanted any more, and whether that was so before, not long ago.
type ending struct {
	at    Time
	again bool
}

// written is what was answered last when a slice was written.
type written struct {
	version string
	// news is when the newest of the slice's taints that keep pods away was first wanted, and informed when taints without effect were
	// last written.
	news, informed Time
}

// Memory is what Decide remembers for pace. With a new one the same is written, perhaps at another time. It is for one goroutine.
type Memory struct {
	p *Pace
	// unread means that the slices have to be read. heard means that somebody else may have changed them since the last comparison,
	// and repaired that a write has succeeded since repairs were last slowed down.
	unread, heard, repaired bool
	// wantedSince is when a taint was first wanted, and ended when one was not wanted any more.
	wantedSince map[wantedTaint]Time
	ended       map[taintKey]ending
	// wrote is by the names of slices.
	wrote map[string]written
	// repairAt is when what others have changed may be put back.
	repairDelay, repairAt Time
	// triedAt is when the last request was answered, or not.
	retryDelay, retryAt, triedAt Time
	// paid is until when the budget has been spent.
	paid Time
}

// NewMemory is that of a process that begins.
func NewMemory(p *Pace) *Memory {
	return &Memory{
		p: p, unread: true, repaired: true, wantedSince: map[wantedTaint]Time{}, ended: map[taintKey]ending{}, wrote: map[string]written{},
		repairAt: Never, retryAt: Never, triedAt: Never, paid: Never,
	}
}

// noteTaints notes since when taints are wanted, and when one has ended.
func (m *Memory) noteTaints(all []slot, now Time) {
	wantedSince := map[wantedTaint]Time{}
	for i := range all {
		s := &all[i]
		for _, device := range s.want.Spec.Devices {
			for _, t := range device.Taints {
				k := wantedTaint{taintKey{device.Name, t.Key}, t.Effect}
				since, known := m.wantedSince[k]
				if !known {
					since = now
				}
				wantedSince[k] = since
				if keepsAway(t.Effect) {
					s.news = max(s.news, since)
				}
			}
		}
	}
	maps.DeleteFunc(m.ended, func(_ taintKey, e ending) bool { return now-e.at > m.p.HoldForgotten })
	for k := range m.wantedSince {
		if _, still := wantedSince[k]; !still {
			_, again := m.ended[k.taintKey]
			m.ended[k.taintKey] = ending{now, again}
		}
	}
	m.wantedSince = wantedSince
}

// last is what was written last of a slice.
func (m *Memory) last(name string) written {
	if w, known := m.wrote[name]; known {
		return w
	}
	return written{news: Never, informed: Never}
}

// repairs returns when changes by others may be undone. The more often they change the slices, the longer it waits.
func (m *Memory) repairs(now Time) Time {
	if m.heard && m.repaired && now >= m.repairAt {
		if now-m.repairAt > m.p.RepairForgotten {
			m.repairDelay = 0
		}
		m.repaired, m.repairAt = false, now+m.repairDelay
		m.repairDelay = min(max(m.p.Repair, 2*m.repairDelay), m.p.RepairMost)
	}
	return m.repairAt
}

// Reread has the slices read: something else may be stored than is known.
func (m *Memory) Reread() { m.unread = true }

// Registered is called when the kubelet has registered the plugin: what it has deleted comes back at once.
func (m *Memory) Registered() {
	m.unread, m.repairDelay, m.repairAt, m.retryAt = true, 0, Never, Never
}

// Listed notes that the slices were read.
func (m *Memory) Listed(now Time) {
	m.unread, m.heard = false, true
	m.triedAt, m.retryAt = now, Never
}

// Wrote takes the version that was answered to a write.
func (m *Memory) Wrote(r *Request, version string, now Time) {
	informed := m.last(r.Slice.Name).informed
	if r.informs {
		informed = now
	}
	m.wrote[r.Slice.Name] = written{version, r.News, informed}
	// What cannot wait may be in debt, for which the rest waits.
	if r.spends {
		m.paid = min(max(m.paid, now-Time(m.p.Burst)*m.p.Every)+m.p.Every, now+debt*m.p.Every)
	}
	m.succeeded(now)
}

// Changed notes that something else was stored than was sent: that is a change by others.
func (m *Memory) Changed(r *Request) {
	was := m.last(r.Slice.Name)
	m.wrote[r.Slice.Name] = written{"", was.news, was.informed}
	m.heard, m.repaired = true, true
}

// Deleted notes that a slice was deleted, or is not there.
func (m *Memory) Deleted(name string, now Time) {
	delete(m.wrote, name)
	m.succeeded(now)
}

func (m *Memory) succeeded(now Time) {
	m.repaired, m.triedAt, m.retryDelay, m.retryAt = true, now, 0, Never
}

// Refused notes that a request has failed. jitter is between 0 and 1.
func (m *Memory) Refused(now Time, jitter float64) {
	m.retryDelay = min(max(m.p.Retry, m.retryDelay*3/2), m.p.RetryMost)
	m.triedAt, m.retryAt = now, now+m.retryDelay+Time(jitter*float64(m.retryDelay)/2)
}

// RetryAt is when a request may be tried again after one has failed.
func (m *Memory) RetryAt() Time { return m.retryAt }
