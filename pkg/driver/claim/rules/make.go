// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// make brings a claim to what it wants on this GPU, or says why not. A claim that is prepared is made again in the same
// way: nothing is left to do for it where everything is there.
func (c *claim) make() {
	if r := c.record(c.Claim.UID); r != c.Record && r.BootID == c.Boot {
		c.verdict(Verdict{State: Waiting, Other: c.Claim.UID, Cause: ErrTaken, Why: "what the claim had before is released first"})
		return
	}
	for i, p := range c.parts {
		if p.isRefused() {
			c.unmake(p)
			return
		}
		if v := c.inTheWay(p, c.parts[:i]); v != nil {
			c.verdict(*v)
			return
		}
	}
	m := &making{claim: c}
	for i := range c.parts {
		if v := m.makePart(i); v != nil {
			if len(c.Guards) > 0 && (errors.Is(v, partition.ErrForeign) || errors.Is(v, partition.ErrDivided)) {
				v.Why += "; it may be that of " + c.Guards[0].String()
			}
			v.State = Refused
			c.verdict(*v)
			return
		}
	}
	m.propose()
}

// makePart makes a part, or says why not.
func (m *making) makePart(i int) *Verdict {
	p := m.parts[i]
	switch {
	case p.Admin || p.IsStatic():
		return m.useAsIs(p)
	case slices.ContainsFunc(m.parts[:i], func(q part) bool { return q.SameDevice(p.Part) }):
		m.start(p) // its first share of the device makes it
		return nil
	case p.IsMadeForClaims():
		return m.partition(p)
	}
	return m.whole(p)
}

// unmake takes back what was started of a part that the hardware refuses.
func (c *claim) unmake(p part) {
	c.verdict(c.Refused.verdict())
	if c.State == record.Prepared || p.Mark != record.Started || len(p.sharers()) > 0 {
		return
	}
	if i := c.at(p.Place()); i == nil || len(i.Compute) == 0 {
		c.task(Task{Aim: Make, Actions: append(p.undoLast(i), p.action(Unstart))})
	}
}

// making collects what brings a claim to what it wants on this GPU.
type making struct {
	*claim
	// actions are in the order of the parts: each is started right before its first effect, so that what is refused to one
	// part leaves no mark of those that come after it.
	actions []Action
}

func (m *making) do(kind ActionKind, p part) { m.actions = append(m.actions, p.action(kind)) }

func (m *making) start(p part) {
	interval := p.interval()
	if p.Mark == record.Started && interval == p.Shared().Interval {
		return
	}
	if p.Mark == record.Started && p.Shared().Interval != "" && interval == "" {
		m.do(ResetInterval, p) // before the record forgets that it was set
	}
	m.do(Start, p)
}

func (m *making) useAsIs(p part) *Verdict {
	i := m.at(p.Place())
	switch {
	case p.Partition == nil || i != nil && len(i.Compute) == 1:
		m.start(p)
		return nil
	case p.IsStatic():
		return p.says(Verdict{}, ": the partition was not made by this driver and is not there any more")
	}
	return p.says(Verdict{}, ": there is no partition now, and admin access does not make one")
}

func (m *making) partition(p part) *Verdict {
	i := m.at(p.Place())
	ours := p.Mark == record.Started || len(p.sharers()) > 0 || p.Mark == record.Untouched && m.guardOf(m.Claim.UID) != nil
	switch {
	case i == nil:
		return m.create(p)
	case !ours:
		return p.says(Verdict{Cause: partition.ErrForeign}, ": GPU instance %d is in its place; it was not made by this driver and is left alone", i.ID)
	case len(i.Compute) > 1:
		return p.says(Verdict{Cause: partition.ErrForeign}, ": somebody else has divided GPU instance %d into %d compute instances", i.ID, len(i.Compute))
	}
	m.start(p)
	if len(i.Compute) == 0 {
		m.do(DropNamesakes, p)
		m.do(CreateCI, p)
	}
	return nil
}

// create makes a partition where nothing is.
func (m *making) create(p part) *Verdict {
	if i := find(m.Hardware.Instances, func(i *gpu.Instance) bool { return placeOf(i).Overlaps(p.Place()) }); i != nil {
		return p.says(Verdict{Cause: partition.ErrForeign}, ": GPU instance %d (placement %d:%d), which no claim has, overlaps with it", i.ID, i.Placement.Start, i.Placement.Size)
	}
	if !m.Hardware.Enabled && !p.DynamicMIG {
		return p.says(Verdict{}, ": MIG mode is off, and on this GPU only an administrator changes it (nvidia-smi -i %s -mig 1, and a reset)", m.GPU)
	}
	if !m.Hardware.Enabled && !slices.ContainsFunc(m.actions, func(a Action) bool { return a.Kind == EnableMIG }) {
		if m.State != record.Prepared {
			m.do(Announce, p)
		}
		m.do(EnableMIG, p)
	}
	m.do(Start, p) // also where it is written already: the place is empty now
	if m.session(p.SessionID()) != nil {
		m.do(StopSession, p) // that of a partition which is gone, so that the next one can have its name
	}
	m.do(CreateGI, p)
	m.do(DropNamesakes, p)
	m.do(CreateCI, p)
	return nil
}

func (m *making) whole(p part) *Verdict {
	h := &m.Hardware
	switch {
	case len(h.Instances) > 0:
		return p.says(Verdict{Cause: partition.ErrDivided}, ": the GPU is partitioned: there is GPU instance %d, which no claim has", h.Instances[0].ID)
	case h.Enabled && p.Divisible && !p.DynamicMIG:
		return p.says(Verdict{}, ": MIG mode is on, and on this GPU only an administrator changes it (nvidia-smi -i %s -mig 0, and a reset)", m.GPU)
	}
	if v := m.wrongMode(p); v != nil {
		return v
	}
	m.start(p)
	if h.Enabled && p.Divisible {
		m.do(DisableMIG, p)
	}
	if p.SessionID() != "" && !h.Exclusive {
		m.do(SetExclusive, p)
	}
	return nil
}

// wrongMode says why the compute mode of a GPU cannot be that of an MPS session.
func (m *making) wrongMode(p part) *Verdict {
	h := &m.Hardware
	known := p.Mark == record.Started || len(p.sharers()) > 0 || m.guardOf(m.Claim.UID) != nil
	switch {
	case p.SessionID() == "":
		return nil
	case h.NoMode:
		return p.says(Verdict{}, ": MPS needs a compute mode of GPU %s, and the driver does not support any there", m.GPU)
	case h.OtherMode || h.Exclusive && !known:
		mode := map[bool]string{true: "EXCLUSIVE_PROCESS", false: "not DEFAULT"}[h.Exclusive]
		return p.says(Verdict{}, ": the compute mode of GPU %s is %s and was not set by this driver; set it back with nvidia-smi -i %s -c DEFAULT", m.GPU, mode, m.GPU)
	}
	return nil
}

// propose adds the sessions and what a claim on several GPUs does on all of them at once.
func (m *making) propose() {
	here, jointly := m.sessions()
	gpus, actions := m.gpus(""), append(m.actions, here...)
	if len(gpus) > 1 && len(actions) > 0 {
		m.task(Task{Aim: Make, Actions: actions})
		return
	}
	actions = append(actions, jointly...)
	for _, p := range m.parts {
		if !p.Admin && !p.intervalStands() {
			actions = append(actions, p.action(SetInterval))
		}
	}
	spec := m.spec(m.Claim.UID)
	if m.State == record.Prepared && !m.Outdated && len(actions) == 0 && spec != nil && !spec.Outdated &&
		!slices.ContainsFunc(m.parts, func(p part) bool { return !p.isNamed() }) {
		m.verdict(Verdict{State: Complete})
		return
	}
	m.commit(gpus, actions)
}

// commit writes down that all of the claim is there, after these actions, which are the last.
func (m *making) commit(gpus []string, actions []Action) {
	final := []Action{m.action(WriteSpec, m.Claim.UID)}
	if len(gpus) == 1 && !slices.ContainsFunc(actions, func(a Action) bool { return a.Kind != Start || a.Place != record.Undivided }) {
		// The hardware does not change, so that the CDI spec comes first and the record is written once. A spec that a crash leaves
		// without a record is removed. A spec of a partition could not stay until then: the partition may be another claim's by then.
		final, actions = append(final, actions...), nil
	}
	final = append(final, m.action(MarkPrepared, m.Claim.UID))
	if m.guardOf(m.Claim.UID) != nil {
		final = append(final, m.action(DropGuard, m.Claim.UID))
	}
	m.task(Task{Aim: Commit, Actions: actions, Final: final, With: gpus})
}

// gpus are those of the claim, or of one of its sessions.
func (r *Record) gpus(session string) (gpus []string) {
	for i := range r.Devices {
		if d := &r.Devices[i]; (session == "" || d.Shared().Session == session) && !slices.Contains(gpus, d.PCIAddress) {
			gpus = append(gpus, d.PCIAddress)
		}
	}
	return gpus
}

// sessions brings those of the claim's parts to what their holders need. What is on several GPUs is started when all of
// the claim's are ready, for the first of them.
func (m *making) sessions() (here, jointly []Action) {
	for i, p := range m.parts {
		id := p.SessionID()
		if id == "" || p.Admin || slices.ContainsFunc(m.parts[:i], func(q part) bool { return q.SessionID() == id }) {
			continue
		}
		a := p.action(StartSession)
		a.Demand = demandOf(append(p.remainingSharers(), p.among(m.parts)...))
		s, own, gpus := m.session(id), m.Session(id), m.gpus(id)
		stands := s != nil && (own != nil && !own.Shared || s.Demand == a.Demand) && (s.Running || m.State == record.Prepared)
		switch {
		case stands && (p.Partition == nil || m.at(p.Place()) != nil): // that of a partition which is made again does not
		case len(gpus) == 1:
			here = append(here, a)
		case gpus[0] == m.GPU:
			jointly = append(jointly, a)
		}
	}
	return here, jointly
}

// demandOf is what lets all these shares have what they need: a server holds everybody to its limits.
func demandOf(shares []part) (all Demand) {
	for i, p := range shares {
		s := p.Shared()
		one := Demand{Limits: s.Limits, Priority: s.ClientPriority, OnClientKilled: s.OnClientKilled}
		if i == 0 {
			all = one
		}
		all.Percent = larger(all.Percent, one.Percent)
		all.MemoryBytes = larger(all.MemoryBytes, one.MemoryBytes)
		if all.Priority != one.Priority {
			all.Priority = policy.PriorityNormal // those with a lower one have it in their environment as well
		}
		all.OnClientKilled = cmp.Or(all.OnClientKilled, one.OnClientKilled)
	}
	return all
}

// larger returns the larger of two limits, of which zero is none.
func larger[T int | int64](a, b T) T {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}

// inTheWay says which other claim has the place of a part, or who uses what is about to be given out. before are the
// claim's parts that come first.
func (c *claim) inTheWay(p part, before []part) *Verdict {
	if v := c.overlap(p); v != nil || p.Admin {
		return v
	}
	if v := c.noShareLeft(p, before); v != nil {
		return v
	}
	switch g := c.guardBesides(c.Claim.UID); {
	case g != nil && c.mayBeGuarded(p):
		return p.says(Verdict{State: Waiting, Cause: ErrGuarded, Other: g.Claim.UID}, " may be in use by %s", g.String())
	case p.SessionID() != "" && c.Unsupervised != nil:
		return p.says(Verdict{State: Waiting, Cause: c.Unsupervised}, ": the MPS supervisor of this node does not answer, is the DaemonSet of the mps-supervisor running? %v", c.Unsupervised)
	case c.State != record.Prepared && (p.Partition == nil || p.IsStatic()):
		return c.notIdle(p)
	}
	return nil
}

// notIdle says what keeps a device from being given out that is used as it is, a GPU or a partition that somebody else made: it must be
// idle first. Processes of claims that have a share of it do not count.
func (c *claim) notIdle(p part) *Verdict {
	users, fabric := p.users(), c.Hardware.Fabric
	switch {
	case users != "" && len(p.remainingSharers()) == 0 && c.guardOf(c.Claim.UID) == nil:
		return p.says(Verdict{State: Waiting, Cause: gpu.ErrInUse}, ": GPU %s is in use by processes that no claim explains: %s", c.GPU, users)
	case p.Partition == nil && fabric != "":
		return p.says(Verdict{State: Waiting, Cause: gpu.ErrFabricPending}, ": CUDA programs would not start: GPU %s is not registered with the NVLink fabric yet (%s)", c.GPU, fabric)
	}
	return nil
}

// overlap reports how a part of another claim is in the way.
func (c *claim) overlap(p part) *Verdict {
	for _, q := range c.held(func(q part) bool { return q.of.Claim.UID != c.Claim.UID }) {
		v, state := Verdict{State: Waiting, Cause: ErrTaken, Other: q.of.Claim.UID}, q.of.State
		if c.leaving(q.of) {
			state = record.Releasing
		}
		switch {
		case p.Conflicts(q.Part):
			is := map[record.State]string{record.Preparing: "being prepared", record.Prepared: "prepared", record.Releasing: "being released"}[state]
			why := fmt.Sprintf(" overlaps with %s, which is %s for claim %s", q.Device, is, q.of.Claim)
			if users := q.users(); state == record.Releasing && users != "" {
				why += " and is in use: " + users
			}
			return p.says(v, "%s", why)
		case p.SameDevice(q.Part) && state != record.Releasing && (q.Mark == record.Lost || q.isLost()):
			return p.says(v, ": claim %s has lost its share of the partition, which is made again when that claim is released", q.of.Claim)
		}
	}
	return nil
}

// noShareLeft counts the shares that claims have of a device. Processes that died may have started more parts than there are
// shares: of these the first that are prepared get them.
func (c *claim) noShareLeft(p part, before []part) *Verdict {
	others, own := p.others(), 1+len(p.among(before))
	if p.Mark == record.Started {
		others = slices.DeleteFunc(others, func(q part) bool { return q.of.State != record.Prepared })
	}
	switch {
	case !p.Type.IsShare() || p.Clients == 0 || c.State == record.Prepared || len(others)+own <= p.Clients:
		return nil
	case len(others) == 0:
		return p.says(Verdict{State: Refused}, ": the claim is allocated %d shares of it, and it has %d", own, p.Clients)
	}
	first := others[0].of
	return p.says(Verdict{State: Waiting, Cause: ErrTaken, Other: first.Claim.UID}, " has %d shares and all are taken, one of them by claim %s", p.Clients, first.Claim)
}

// mayBeGuarded: a claim whose record cannot be read may have an undivided GPU, and what is shared. Other partitions are
// seen on the hardware.
func (c *claim) mayBeGuarded(p part) bool {
	return p.Mark != record.Started && !p.IsStatic() && (p.Partition == nil || !c.Hardware.Enabled || p.Type.IsShare())
}
