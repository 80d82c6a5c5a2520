// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import "fmt"

// inTheWay says which other claim has the place of a part, or who uses what is about to be given out. before are the
// claim's parts that come first.
func (d *decision) inTheWay(r *Record, p *Part, before []*Part) *Verdict {
	for i := range d.Records {
		o := &d.Records[i]
		if o == r || o.Boot != d.Boot || o.Phase == Wanted {
			continue
		}
		if o.Claim == r.Claim {
			return &Verdict{State: Waiting, Other: o.Claim, Code: Overlap, Why: "what the claim had before is released first"}
		}
		for _, q := range d.on(o) {
			if v := d.blockedBy(p, o, q); v != nil {
				return v
			}
		}
	}
	if p.Admin {
		return nil
	}
	if v := d.noShareLeft(r, p, before); v != nil {
		return v
	}
	if v := d.guarded(r, p); v != nil {
		return v
	}
	if p.Session != "" && d.Supervisor != Answered {
		return &Verdict{State: Waiting, Code: NoSupervisor, Why: fmt.Sprintf("device %s: the MPS supervisor of this node does not answer, is the DaemonSet of the mps-supervisor running? %s", p.Device, d.SupervisorText)}
	}
	if p.Place == Undivided && r.Phase != Prepared {
		return d.notFree(r, p)
	}
	return nil
}

// blockedBy reports how a part of another claim is in the way.
func (d *decision) blockedBy(p *Part, o *Record, q *Part) *Verdict {
	switch {
	case q.Mark != Untouched && p.Conflicts(q):
		state := "prepared"
		if o.Phase != Prepared {
			state = "being prepared"
		}
		if d.leaving(o) {
			state = "being released"
		}
		return &Verdict{State: Waiting, Other: o.Claim, Code: Overlap,
			Why: fmt.Sprintf("device %s overlaps with %s, which is %s for claim %s", p.Device, q.Device, state, o.Name)}
	case p.SameDevice(q) && !d.leaving(o) && (q.Mark == Lost || d.isLost(o, q)):
		return &Verdict{State: Waiting, Other: o.Claim, Code: Overlap,
			Why: fmt.Sprintf("device %s: claim %s has lost its share of the partition, which is made again when that claim is released", p.Device, o.Name)}
	}
	return nil
}

// noShareLeft counts the shares that claims have of a device. A part that has started has one.
func (d *decision) noShareLeft(r *Record, p *Part, before []*Part) *Verdict {
	if !p.Shared || p.Clients == 0 || p.Mark == Started {
		return nil
	}
	others := d.holders(othersOf(r.Claim, d.sharers(p)))
	own := 1
	for _, q := range before {
		if q.SameDevice(p) {
			own++
		}
	}
	switch {
	case len(others)+own <= p.Clients:
		return nil
	case len(others) == 0:
		return &Verdict{State: Refused, Why: fmt.Sprintf("device %s: the claim is allocated %d shares of it, and it has %d", p.Device, own, p.Clients)}
	}
	return &Verdict{State: Waiting, Other: others[0].record.Claim, Code: SharesTaken,
		Why: fmt.Sprintf("device %s has %d shares and all are taken, one of them by claim %s", p.Device, p.Clients, others[0].record.Name)}
}

// guarded keeps from use what a claim may have whose record cannot be read: an undivided GPU, and what is shared. Other
// partitions are seen on the hardware.
func (d *decision) guarded(r *Record, p *Part) *Verdict {
	g := d.guardedFrom(r.Claim)
	if g == nil || p.Mark == Started || p.Kind == Static {
		return nil
	}
	if p.Place != Undivided && d.Hardware.MIG && !p.Shared {
		return nil
	}
	return &Verdict{State: Waiting, Other: g.Claim, Code: Guarded,
		Why: fmt.Sprintf("device %s may be in use by a claim whose record cannot be read (%s): %s", p.Device, g.Path, g.Remedy)}
}

// notFree says who has the undivided GPU that no claim explains. A GPU that is given back is given out again when it is
// idle; what those have who hold a share of it is theirs.
func (d *decision) notFree(r *Record, p *Part) *Verdict {
	users := d.Hardware.Users
	switch {
	case users.Any() && len(d.holders(d.sharers(p))) == 0 && !d.guardOf(r.Claim):
		text := fmt.Sprintf("device %s: GPU %s is in use by processes that no claim explains: %s", p.Device, d.GPU, users.Text)
		d.say(Statement{Place: p.Place, Device: p.Device, Reason: UsedByOthers, Text: text})
		return &Verdict{State: Waiting, Code: InUse, Why: text}
	case p.Divisible && d.Hardware.Fabric != "":
		return &Verdict{State: Waiting, Code: NotRegistered,
			Why: fmt.Sprintf("device %s: CUDA programs would not start: GPU %s is not registered with the NVLink fabric yet (%s)", p.Device, d.GPU, d.Hardware.Fabric)}
	}
	return nil
}
