// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/policy"
)

// isLost reports whether a partition that was there is not. What was refused a moment ago is not lost: it was about to
// be made again.
func (d *decision) isLost(r *Record, p *Part) bool {
	return r.Phase == Prepared && p.Mark == Started && p.Place != Undivided && !p.Admin && d.at(p.Place) == nil && !d.refused(r, p)
}

// isEmptied reports whether somebody has destroyed the compute instance of a partition. It is made again when the kubelet
// asks: an administrator may be about to destroy the rest.
func (d *decision) isEmptied(r *Record, p *Part) bool {
	i := d.at(p.Place)
	return r.Phase == Prepared && p.Mark == Started && p.Place != Undivided && !p.Admin && i != nil && i.Compute == 0
}

// lose writes down that partitions were seen to be absent. A partition in their place is somebody else's from now on.
func (d *decision) lose(r *Record, parts []*Part) {
	d.gone(r, parts)
	actions := []Action{{Do: RemoveSpec, Claim: r.Claim, GPU: d.GPU}}
	for _, p := range parts {
		if d.isLost(r, p) {
			actions = append(actions, d.action(MarkLost, r, p))
		}
	}
	d.repairs = append(d.repairs, Task{Claim: r.Claim, Aim: Repair, Actions: actions})
}

func (d *decision) gone(r *Record, parts []*Part) {
	var names []string
	for _, p := range parts {
		if p.Mark != Lost && !d.isLost(r, p) && !d.isEmptied(r, p) {
			continue
		}
		names = append(names, p.Device)
		d.say(Statement{Place: p.Place, Claim: r.Claim, Device: p.Device, Reason: PartitionGone,
			Text: fmt.Sprintf("the partition of device %s was removed by somebody else, or by a reset of the GPU", p.Device)})
	}
	d.verdict(r, Verdict{State: Missing, Why: fmt.Sprintf("the partition of device %s was removed by somebody else, or by a reset of the GPU", strings.Join(names, ", "))})
}

// making collects what brings a claim to what it wants on this GPU.
type making struct {
	*decision
	r *Record
	// actions are in the order of the parts: each is started right before its first effect, so that what is refused to one
	// part leaves no mark of those that come after it.
	actions []Action
	// modeOn means that the actions turn MIG mode on.
	modeOn bool
}

// make brings a claim to what it wants on this GPU, or says why not. A claim that is prepared is made again in the same
// way: nothing is left to do for it where everything is there.
func (d *decision) make(r *Record, parts []*Part) {
	for i, p := range parts {
		if d.refused(r, p) {
			d.unmake(r, p)
			return
		}
		if v := d.inTheWay(r, p, parts[:i]); v != nil {
			d.verdict(r, *v)
			return
		}
	}
	m := &making{decision: d, r: r}
	for i, p := range parts {
		var v *Verdict
		switch {
		case p.Admin || p.Kind == Static:
			v = m.useAsIs(p)
		case slices.ContainsFunc(parts[:i], func(q *Part) bool { return q.SameDevice(p) }):
			m.start(p) // its first share of the device makes it
		case p.Kind == Partition:
			v = m.partition(p)
		default:
			v = m.whole(p)
		}
		if v != nil {
			v.State = Refused
			d.verdict(r, *v)
			d.say(Statement{Place: p.Place, Claim: r.Claim, Device: p.Device, Reason: Occupied, Text: v.Why})
			return
		}
	}
	m.propose(parts)
}

// unmake takes back what was begun with a part that the hardware refuses.
func (d *decision) unmake(r *Record, p *Part) {
	v := Verdict{State: Refused, Why: d.Refused.Text}
	if d.Refused.InUse {
		v.State, v.Code = Waiting, InUse
		d.say(Statement{Place: p.Place, Claim: r.Claim, Device: p.Device, Reason: UsedByOthers, Text: d.Refused.Text})
	}
	d.verdict(r, v)
	if r.Phase == Prepared || p.Mark != Started || len(d.sharers(p)) > 0 {
		return
	}
	var actions []Action
	switch i := d.at(p.Place); {
	case i != nil && i.Compute > 0:
		return
	case i != nil:
		actions = append(actions, d.action(DestroyGI, r, p))
	case p.Session != "" && p.Place == Undivided && d.Hardware.Exclusive:
		actions = append(actions, d.action(SetDefault, r, p))
	}
	d.makes = append(d.makes, Task{Claim: r.Claim, Aim: Make, Actions: append(actions, d.action(Unstart, r, p))})
}

// modeOff turns MIG mode off again where the hardware has refused the only instance, unless because somebody uses the GPU: it
// is tried again then.
func (d *decision) modeOff(r *Record, p *Part) []Action {
	if !d.Hardware.MIG || !p.Dynamic || d.Refused.InUse || len(d.Hardware.Instances) > 0 {
		return nil
	}
	if d.anyStarted(func(_ *Record, q *Part) bool { return q.Kind == Partition && q.Place != p.Place }) {
		return nil
	}
	return []Action{d.action(DisableMIG, r, p)}
}

func (m *making) start(p *Part) {
	if interval := m.interval(p); p.Mark != Started || interval != p.Interval {
		if p.Mark == Started && p.Interval != "" && interval == "" {
			m.do(ResetInterval, p) // before the record forgets that it was set
		}
		a := m.action(Start, m.r, p)
		a.Interval = interval
		m.actions = append(m.actions, a)
	}
}

func (m *making) do(a Do, p *Part) { m.actions = append(m.actions, m.action(a, m.r, p)) }

func (m *making) useAsIs(p *Part) *Verdict {
	if i := m.at(p.Place); p.Place != Undivided && (i == nil || i.Compute != 1) {
		why := fmt.Sprintf("device %s: there is no partition now, and admin access does not make one", p.Device)
		if p.Kind == Static {
			why = fmt.Sprintf("device %s: the partition was not made by this driver and is not there any more", p.Device)
		}
		return &Verdict{Why: why}
	}
	m.start(p)
	return nil
}

func (m *making) partition(p *Part) *Verdict {
	i := m.at(p.Place)
	ours := p.Mark == Started || len(m.sharers(p)) > 0 || p.Mark == Untouched && m.guardOf(m.r.Claim)
	switch {
	case i != nil && !ours:
		return &Verdict{Code: Foreign, Why: fmt.Sprintf("device %s: GPU instance %d is in its place; it was not made by this driver and is left alone%s", p.Device, i.ID, m.guardHint())}
	case i != nil && i.Compute > 1:
		return &Verdict{Code: Foreign, Why: fmt.Sprintf("device %s: somebody else has divided GPU instance %d into %d compute instances", p.Device, i.ID, i.Compute)}
	case i != nil:
		m.start(p)
		if i.Compute == 0 {
			m.do(DropNamesakes, p)
			m.do(CreateCI, p)
		}
		return nil
	}
	return m.create(p)
}

// create makes a partition where nothing is.
func (m *making) create(p *Part) *Verdict {
	for k := range m.Hardware.Instances {
		if o := &m.Hardware.Instances[k]; o.Place.Overlaps(p.Place) {
			return &Verdict{Code: Foreign, Why: fmt.Sprintf("device %s: GPU instance %d (placement %d:%d), which no claim has, overlaps with it%s",
				p.Device, o.ID, o.Place.Start, o.Place.Size, m.guardHint())}
		}
	}
	if !m.Hardware.MIG && !p.Dynamic {
		return &Verdict{Code: ModeFixed, Why: fmt.Sprintf("device %s: MIG mode is off, and on this GPU only an administrator changes it (nvidia-smi -i %s -mig 1, and a reset)", p.Device, m.GPU)}
	}
	if !m.Hardware.MIG && !m.modeOn {
		m.modeOn = true
		if m.r.Phase != Prepared {
			m.do(Announce, p)
		}
		m.do(EnableMIG, p)
	}
	m.do(Start, p) // also where it is written already: the place is empty now
	if m.session(p.Session) != nil {
		m.do(StopSession, p) // that of a partition which is gone, so that the next one can have its name
	}
	m.do(CreateGI, p)
	m.do(DropNamesakes, p)
	m.do(CreateCI, p)
	return nil
}

func (m *making) whole(p *Part) *Verdict {
	known := p.Mark == Started || len(m.sharers(p)) > 0 || m.guardOf(m.r.Claim)
	switch {
	case len(m.Hardware.Instances) > 0:
		return &Verdict{Code: Divided, Why: fmt.Sprintf("device %s: the GPU is partitioned: there is GPU instance %d, which no claim has%s", p.Device, m.Hardware.Instances[0].ID, m.guardHint())}
	case p.Session != "" && (m.Hardware.OtherMode || m.Hardware.Exclusive && !known):
		return &Verdict{Code: ModeFixed, Why: fmt.Sprintf("device %s: the compute mode of GPU %s is %s and was not set by this driver; set it back with nvidia-smi -i %s -c DEFAULT", p.Device, m.GPU, m.modeName(), m.GPU)}
	case m.Hardware.MIG && p.Divisible && !p.Dynamic:
		return &Verdict{Code: ModeFixed, Why: fmt.Sprintf("device %s: MIG mode is on, and on this GPU only an administrator changes it (nvidia-smi -i %s -mig 0, and a reset)", p.Device, m.GPU)}
	}
	m.start(p)
	if m.Hardware.MIG && p.Divisible {
		m.do(DisableMIG, p)
	}
	if p.Session != "" && !m.Hardware.Exclusive {
		m.do(SetExclusive, p)
	}
	return nil
}

func (m *making) modeName() string {
	if m.Hardware.Exclusive {
		return "EXCLUSIVE_PROCESS"
	}
	return "not DEFAULT"
}

// interval is the time slice that a part gets: all shares of a GPU have that of those that are prepared, or that have come
// first, and none if these have asked for none, whatever the policy says by now.
func (m *making) interval(p *Part) policy.Interval {
	if m.r.Phase == Prepared || !p.Shared || p.Place != Undivided || p.Session != "" {
		return p.Interval
	}
	holders := m.holders(m.sharers(p))
	if len(holders) == 0 {
		return p.Interval
	}
	prepared := slices.IndexFunc(holders, func(s sharer) bool { return s.record.Phase == Prepared })
	return holders[max(prepared, 0)].Interval
}

// propose adds the sessions and what a claim on several GPUs does on all of them at once.
func (m *making) propose(parts []*Part) {
	d, r := m.decision, m.r
	gpus := r.gpus()
	actions := m.actions
	sessions, jointly := m.startSessions(parts)
	if len(jointly) > 0 && len(actions)+len(sessions) == 0 {
		d.verdict(r, Verdict{State: Working})
		d.makes = append(d.makes, Task{Claim: r.Claim, Aim: StartJointly, With: r.gpusOf(jointly), Final: jointly})
		return
	}
	actions = append(actions, sessions...)
	if len(gpus) > 1 && len(actions) > 0 {
		d.verdict(r, Verdict{State: Working})
		d.makes = append(d.makes, Task{Claim: r.Claim, Aim: Make, Actions: actions})
		return
	}
	for _, p := range parts {
		if interval := m.interval(p); interval != "" && !p.Admin && !d.intervalStands(r, p, interval) {
			a := d.action(SetInterval, r, p)
			a.Interval = interval
			actions = append(actions, a)
		}
	}
	if r.Phase == Prepared && !r.Outdated && len(actions) == 0 && d.specStands(r, parts) {
		d.verdict(r, Verdict{State: Complete})
		return
	}
	d.verdict(r, Verdict{State: Working})
	final := []Action{{Do: WriteSpec, Claim: r.Claim, GPU: d.GPU}, {Do: MarkPrepared, Claim: r.Claim, GPU: d.GPU}}
	if d.guardOf(r.Claim) {
		final = append(final, Action{Do: DropGuard, Claim: r.Claim, GPU: d.GPU})
	}
	d.makes = append(d.makes, Task{Claim: r.Claim, Aim: Commit, Actions: actions, Final: final, With: gpus})
}

// gpusOf are the GPUs of the sessions that these actions are about. Others of the claim need not be ready.
func (r *Record) gpusOf(sessions []Action) []string {
	var gpus []string
	for i := range r.Parts {
		p := &r.Parts[i]
		in := slices.ContainsFunc(sessions, func(a Action) bool { return a.Session == p.Session })
		if in && !slices.Contains(gpus, p.GPU) {
			gpus = append(gpus, p.GPU)
		}
	}
	return gpus
}

// startSessions brings the sessions of a claim's parts to what their holders need. What is on several GPUs is started
// when all of them are ready for it.
func (m *making) startSessions(parts []*Part) (here, jointly []Action) {
	var done []string
	for _, p := range parts {
		if p.Session == "" || p.Admin || slices.Contains(done, p.Session) {
			continue
		}
		done = append(done, p.Session)
		want := p.Demand
		if !p.Own {
			want = demandOf(append(m.holders(m.sharers(p)), m.ownShares(p, parts)...))
		}
		switch {
		case m.sessionStands(p, want):
			continue
		case m.session(p.Session) == nil && m.r.Phase == Prepared:
			m.say(Statement{Place: p.Place, Claim: m.r.Claim, Device: p.Device, Reason: SessionGone,
				Text: fmt.Sprintf("processes of device %s have lost their MPS server", p.Device)})
		}
		a := m.action(StartSession, m.r, p)
		a.Demand = want
		spans := slices.ContainsFunc(m.r.Parts, func(q Part) bool { return q.Session == p.Session && q.GPU != m.GPU })
		if spans {
			jointly = append(jointly, a)
		} else {
			here = append(here, a)
		}
	}
	return here, jointly
}

// sessionStands reports whether the session of a part is there as its holders need it. That of a partition which is made
// again is not.
func (m *making) sessionStands(p *Part, want Demand) bool {
	s := m.session(p.Session)
	replaced := slices.ContainsFunc(m.actions, func(a Action) bool { return a.Do == StopSession && a.Session == p.Session })
	return s != nil && !replaced && (p.Own || s.Demand == want) && (s.Running || m.r.Phase == Prepared)
}

// ownShares are the claim's own parts of a shared device, whether or not they are started.
func (m *making) ownShares(p *Part, parts []*Part) []sharer {
	own := []sharer{{m.r, p}}
	for _, q := range parts {
		if q != p && q.SameDevice(p) && q.Mark != Started {
			own = append(own, sharer{m.r, q})
		}
	}
	return own
}

func (d *decision) specStands(r *Record, parts []*Part) bool {
	at := slices.IndexFunc(d.Specs, func(s Spec) bool { return s.Claim == r.Claim })
	if at < 0 || d.Specs[at].Outdated {
		return false
	}
	return !slices.ContainsFunc(parts, func(p *Part) bool {
		i := d.at(p.Place)
		return p.Place != Undivided && (i == nil || i.ID != p.InstanceID)
	})
}

// intervalStands: the time slice cannot be read, so that the records say whether it was set.
func (d *decision) intervalStands(r *Record, p *Part, interval policy.Interval) bool {
	if d.Hardware.IntervalLost {
		return false
	}
	if r.Phase == Prepared {
		return true
	}
	return slices.ContainsFunc(d.sharers(p), func(s sharer) bool { return s.record.Phase == Prepared && s.Interval == interval })
}
