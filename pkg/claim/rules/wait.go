// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

// inTheWay says which other claim has the place of a part, or who uses what is about to be given out. before are the
// claim's parts that come first.
func (c *claim) inTheWay(p part, before []part) *Verdict {
	for _, q := range c.held(func(q part) bool { return q.of.Claim != c.Claim }) {
		if v := p.blockedBy(q); v != nil {
			v.Other = q.of.Claim
			return v
		}
	}
	if p.Admin {
		return nil
	}
	if v := c.noShareLeft(p, before); v != nil {
		return v
	}
	switch g := c.guardBesides(c.Claim); {
	case g != nil && p.mayBeGuarded():
		v := p.verdict(Waiting, Guarded, " may be in use by %s", g.owner())
		v.Other = g.Claim
		return v
	case p.Session != "" && c.Supervisor != Answered:
		return p.verdict(Waiting, NoSupervisor, ": the MPS supervisor of this node does not answer, is the DaemonSet of the mps-supervisor running? %s", c.SupervisorText)
	case p.Place == Undivided && c.Phase != Prepared:
		return c.notFree(p)
	}
	return nil
}

// blockedBy reports how a part of another claim is in the way.
func (p part) blockedBy(q part) *Verdict {
	leaving := p.o.leaving(q.of)
	switch {
	case p.Conflicts(q.Part):
		state := "prepared"
		if q.of.Phase != Prepared {
			state = "being prepared"
		}
		if leaving {
			state = "being released"
		}
		return p.verdict(Waiting, Overlap, " overlaps with %s, which is %s for claim %s", q.Device, state, q.of.Name)
	case p.SameDevice(q.Part) && !leaving && (q.Mark == Lost || q.isLost()):
		return p.verdict(Waiting, Overlap, ": claim %s has lost its share of the partition, which is made again when that claim is released", q.of.Name)
	}
	return nil
}

// noShareLeft counts the shares that claims have of a device. A part that has started has one.
func (c *claim) noShareLeft(p part, before []part) *Verdict {
	if !p.Shared || p.Clients == 0 || p.Mark == Started {
		return nil
	}
	others, own := p.others(), 1+len(p.among(before))
	switch {
	case len(others)+own <= p.Clients:
		return nil
	case len(others) == 0:
		return p.verdict(Refused, NoCode, ": the claim is allocated %d shares of it, and it has %d", own, p.Clients)
	}
	v := p.verdict(Waiting, SharesTaken, " has %d shares and all are taken, one of them by claim %s", p.Clients, others[0].of.Name)
	v.Other = others[0].of.Claim
	return v
}

// mayBeGuarded: a claim whose record cannot be read may have an undivided GPU, and what is shared. Other partitions are
// seen on the hardware.
func (p part) mayBeGuarded() bool {
	return p.Mark != Started && p.Kind != Static && (p.Place == Undivided || !p.o.Hardware.MIG || p.Shared)
}

// notFree says who has the undivided GPU that no claim explains. A GPU that is given back is given out again when it is
// idle; what those have who hold a share of it is theirs.
func (c *claim) notFree(p part) *Verdict {
	switch users := c.Hardware.Users; {
	case users.Any() && len(p.holders()) == 0 && c.guardOf(c.Claim) == nil:
		return p.verdict(Waiting, InUse, ": GPU %s is in use by processes that no claim explains: %s", c.GPU, users.Text)
	case p.Divisible && c.Hardware.Fabric != "":
		return p.verdict(Waiting, NotRegistered, ": CUDA programs would not start: GPU %s is not registered with the NVLink fabric yet (%s)", c.GPU, c.Hardware.Fabric)
	}
	return nil
}
