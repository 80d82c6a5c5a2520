// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

// faults are what the world does to the plugin.
func (m *machine) faults(w *world, emit emit) {
	step := func(l Label, change func(n *world)) {
		next := *w
		change(&next)
		emit(l, &next, "")
	}
	for p := int8(1); p <= int8(m.Processes); p++ {
		if w.Left.Crash > 0 && w.active(p) {
			step(Label{What: "is killed", Process: p, Claim: -1, GPU: -1}, func(n *world) { n.Left.Crash--; n.crash(m.Scenario, p) })
		}
	}
	for g := range m.GPUs {
		m.gpuFaults(w, g, step)
		if w.Left.Stranger > 0 && w.GPU[g].Health == healthy {
			m.strangers(w, g, step)
		}
	}
	switch {
	case w.Full:
		step(on("disk: has space again", -1, -1), func(n *world) { n.Full, n.Reserve = false, true })
	case w.Left.Disk > 0:
		step(on("disk: is full", -1, -1), func(n *world) { n.Left.Disk--; n.Full = true })
	}
	for c := range m.Claims {
		if w.Left.Unreadable > 0 && w.Records[c].Exists && w.Records[c].Boot == w.Boot && !m.writing(w, c) {
			step(on("disk: the record becomes unreadable, of", c, -1), func(n *world) {
				n.Left.Unreadable--
				n.Records[c], n.Guards[c] = recordState{}, max(1, n.Records[c].Arrived)
				n.blur(m.Scenario, c)
			})
		}
	}
	switch {
	case w.Away:
		step(on("supervisor: answers again", -1, -1), func(n *world) { n.Away = false })
	case w.Left.Away > 0:
		step(on("supervisor: does not answer", -1, -1), func(n *world) { n.Left.Away--; n.Away = true })
	}
	if w.Left.Reboot > 0 {
		step(on("the machine is started again", -1, -1), func(n *world) { n.Left.Reboot--; n.reboot() })
	}
}

// blur makes what strangers have in the places of a claim indistinct: only its record could tell it from the claim's.
func (w *world) blur(s *Scenario, c int) {
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		if in := w.GPU[p.GPU].at(p.Place); in != nil && in.By == stranger && p.Kind == ofClaims && !p.Admin {
			in.Indistinct = true
		}
	}
}

// writing reports whether a task is at work on a claim. Records are replaced in one piece.
func (m *machine) writing(w *world, c int) bool {
	for i := range w.Work {
		if w.Work[i].Process != 0 && int(w.Work[i].Queue[0].Claim) == c {
			return true
		}
	}
	return false
}

func (w *world) active(p int8) bool {
	for g := range w.Work {
		if w.Work[g].Process == p {
			return true
		}
	}
	for c := range w.Calls {
		if w.Calls[c][0].Process == p || w.Calls[c][1].Process == p || w.Releases[c].Process == p {
			return true
		}
	}
	return false
}

// crash kills a process, which is started again. A call that does not return keeps its process, and
// the lock of its GPU.
func (w *world) crash(s *Scenario, p int8) {
	for g := range w.Work {
		k := &w.Work[g]
		if k.Process != p {
			continue
		}
		if a := k.Queue[0]; needsGPU(a.Kind) && w.GPU[a.GPU].Health == hung {
			w.stick(s, g)
			continue
		}
		w.abandon(s, g)
	}
	for c := range w.Calls {
		if p == 1 {
			w.Cleared[c] = 0
		}
		for slot := range w.Calls[c] {
			if w.Calls[c][slot].Process == p {
				w.Calls[c][slot] = call{}
			}
		}
		if w.Releases[c].Process == p {
			w.Releases[c] = release{}
		}
	}
}

// stick gives up all of a task but the call that does not return, and the locks of all other GPUs.
func (w *world) stick(s *Scenario, g int) {
	k := w.Work[g]
	a := k.Queue[0]
	for _, later := range k.Queue[1:k.N] {
		w.confuse(s, &k, later)
	}
	locks := uint8(1) << a.GPU
	if s.KeepLocks {
		locks = k.Locks
	}
	if k.Stuck || int(a.GPU) == g {
		w.Work[g].Queue = [maxQueue]action{a}
		w.Work[g].N, w.Work[g].Stuck, w.Work[g].Locks = 1, true, locks
		return
	}
	w.Work[g] = work{}
	k.Queue, k.N, k.Stuck, k.Locks = [maxQueue]action{a}, 1, true, locks
	w.Work[a.GPU] = k
}

func (m *machine) gpuFaults(w *world, g int, step func(Label, func(*world))) {
	m.intruders(w, g, step)
	switch w.GPU[g].Health {
	case healthy:
		if w.Left.Hang > 0 {
			step(on("hardware: hangs:", -1, g), func(n *world) {
				n.Left.Hang--
				n.GPU[g].Health = hung
				for i := range n.Work {
					if k := &n.Work[i]; k.Process != 0 && needsGPU(k.Queue[0].Kind) && int(k.Queue[0].GPU) == g {
						n.stick(m.Scenario, i)
					}
				}
			})
			step(on("hardware: is slow:", -1, g), func(n *world) { n.Left.Hang--; n.GPU[g].Health = slow })
		}
		if w.Left.Lost > 0 {
			step(on("hardware: falls off the bus:", -1, g), func(n *world) { n.Left.Lost--; m.fallOff(n, g) })
		}
	case hung:
		step(on("hardware: answers again:", -1, g), func(n *world) { n.GPU[g].Health = healthy })
		for i := range w.Work {
			if w.Work[i].Stuck && int(w.Work[i].Queue[0].GPU) == g {
				step(on("hardware: answers again, the call had failed:", -1, g), func(n *world) {
					n.GPU[g].Health = healthy
					n.abandon(m.Scenario, i)
				})
			}
		}
	case slow, lost:
		step(on("hardware: answers again:", -1, g), func(n *world) { n.GPU[g].Health = healthy })
	}
	// A task that comes to a call on a GPU that hangs gets stuck there.
	for i := range w.Work {
		k := &w.Work[i]
		if k.Process != 0 && !k.Stuck && needsGPU(k.Queue[0].Kind) && int(k.Queue[0].GPU) == g && w.GPU[g].Health == hung {
			step(Label{What: "a call does not return", Process: k.Process, Claim: -1, GPU: int8(g)}, func(n *world) { n.stick(m.Scenario, i) })
		}
	}
}

// intruders are processes of no claim, such as those of a pod that has the device node from elsewhere.
func (m *machine) intruders(w *world, g int, step func(Label, func(*world))) {
	gpu := &w.GPU[g]
	switch {
	case gpu.Intruder != nobody:
		step(on("a process of no claim ends on", -1, g), func(n *world) { n.GPU[g].intrude(nobody) })
	case w.Left.Intrude > 0 && gpu.Health == healthy && !gpu.divided() && !gpu.Exclusive:
		step(on("a process of no claim begins to use", -1, g), func(n *world) {
			n.Left.Intrude--
			n.GPU[g].intrude(present)
			if n.locked(1 << g) {
				n.GPU[g].intrude(unseen)
			}
		})
	}
	if w.Left.Reload > 0 && gpu.Slice != 0 && !m.busy(w, g, undivided) && !w.locked(1<<g) {
		step(on("administrator: loads the driver anew on", -1, g), func(n *world) {
			n.Left.Reload--
			n.GPU[g].Slice, n.GPU[g].SliceLost = 0, n.GPU[g].SliceBy != 0
		})
	}
}

func (g *gpuState) intrude(i intruder) {
	if g.Intruder = i; i == nobody {
		g.Enabled = 0
	}
}

// fallOff takes all that a GPU had. It comes back empty.
func (m *machine) fallOff(w *world, g int) {
	w.GPU[g] = gpuState{Health: lost, SliceLost: w.GPU[g].SliceBy != 0}
	for id := range w.Sessions {
		if m.sessionOn(int8(id+1), int8(g)) {
			w.Sessions[id] = 0
		}
	}
	for c := range m.Claims {
		if !m.has(c, int8(g)) {
			continue
		}
		w.Claims[c].Stays = false
		if w.Claims[c].Kubelet == running {
			w.Claims[c].Kubelet = prepared
		}
	}
}

func (w *world) reboot() {
	w.Boot++
	w.GPU, w.Sessions = [maxGPUs]gpuState{}, [maxSessions]int8{}
	w.Work, w.Releases = [maxGPUs]work{}, [maxClaims]release{}
	w.Calls, w.Tombs = [maxClaims][2]call{}, [maxClaims]int8{}
	for c := range w.Claims {
		k := &w.Claims[c]
		k.Stays = false
		w.Guards[c], w.Cleared[c] = 0, 0 // the first process of a boot sets them aside
		w.Records[c].Arrived = 0
		if k.Kubelet == prepared || k.Kubelet == running {
			k.Kubelet = wants
		}
	}
}

// strangers make and destroy instances, and set the compute mode. They take no locks.
func (m *machine) strangers(w *world, g int, step func(Label, func(*world))) {
	gpu := &w.GPU[g]
	for _, place := range m.Places {
		if in := gpu.at(place); in != nil {
			if m.busy(w, g, place) || m.served(w, g, place) {
				continue
			}
			step(on("stranger: destroys the instance at "+name(place)+" of", -1, g), func(n *world) {
				n.Left.Stranger--
				n.GPU[g].remove(place)
			})
			if in.Compute > 0 {
				step(on("stranger: destroys the compute instance at "+name(place)+" of", -1, g), func(n *world) {
					n.Left.Stranger--
					n.GPU[g].at(place).Compute = 0
				})
			}
			continue
		}
		if gpu.overlapping(place) || m.busy(w, g, undivided) || !gpu.MIG && gpu.Exclusive {
			continue
		}
		step(on("stranger: makes an instance at "+name(place)+" of", -1, g), func(n *world) {
			n.Left.Stranger--
			n.GPU[g].MIG = true
			in := n.GPU[g].add(place, stranger, 1)
			in.Indistinct = m.startedAt(w, g, place) && !m.watched(w, g, place)
			in.Unseen = w.locked(1 << g)
		})
	}
	if w.Left.Mode > 0 && !gpu.MIG && !gpu.Exclusive && !m.sessionsStarted(w, g) && !w.locked(1<<g) {
		step(on("administrator: sets EXCLUSIVE_PROCESS on", -1, g), func(n *world) {
			n.Left.Mode--
			n.Left.Stranger--
			n.GPU[g].Exclusive, n.GPU[g].ExclusiveBy = true, stranger
		})
	}
}

func (m *machine) sessionsStarted(w *world, g int) bool {
	for c := range m.Claims {
		if (w.Records[c].Exists || w.Guards[c] > 0) && m.any(c, int8(g), func(_ int, p *device) bool { return p.Session != none }) {
			return true
		}
	}
	return false
}

func name(p place) string {
	return string(rune('0'+p.Start)) + ":" + string(rune('0'+p.Size))
}

// --- the cluster ---

func (m *machine) cluster(w *world, c int, emit emit) {
	k := &w.Claims[c]
	step := func(what string, change func(n *world)) {
		next := *w
		change(&next)
		emit(on(what, c, -1), &next, "")
	}
	if !k.Allocated && k.Kubelet == idle && w.Left.Rounds[c] > 0 && m.free(w, c) && m.roomFor(w, c) {
		step("scheduler: allocates", func(n *world) {
			n.Left.Rounds[c]--
			n.Claims[c].Allocated, n.Claims[c].Kubelet = true, wants
		})
	}
	if k.Kubelet == prepared && k.Allocated && w.Specs[c].Exists && m.startable(w, c) {
		next := *w
		next.Claims[c].Kubelet = running
		emit(on("kubelet: starts the container of", c, -1), &next, m.owner(w, c))
	}
	if k.Kubelet == prepared && w.Left.Again > 0 {
		step("kubelet: was restarted, prepares again", func(n *world) { n.Left.Again--; n.Claims[c].Kubelet = wants })
	}
	if k.Kubelet == wants || k.Kubelet == prepared || k.Kubelet == running {
		step("kubelet: the pod ends of", func(n *world) { n.end(c) })
		if k.Kubelet == running && w.Left.Stays > 0 {
			step("kubelet: the pod ends, and a process stays, of", func(n *world) { n.Left.Stays--; n.end(c); n.Claims[c].Stays = true })
		}
		if k.Allocated && w.Left.Force > 0 {
			step("user: deletes by force the pod of", func(n *world) { n.Left.Force--; n.Claims[c].Allocated = false })
		}
	}
	if k.Kubelet == ending && w.Releases[c].Process == 0 && w.Left.Orphan > 0 {
		step("kubelet: forgets", func(n *world) { n.Left.Orphan--; n.Claims[c].Kubelet, n.Claims[c].Allocated = idle, false })
	}
	if k.Kubelet == ending && k.Allocated && w.Releases[c].Process != 0 && !w.Releases[c].Late && w.Left.Again > 0 {
		step("kubelet: does not wait for Unprepare any more, another pod has", func(n *world) {
			n.Left.Again--
			n.Claims[c].Kubelet, n.Releases[c].Late = wants, true
		})
	}
	if k.Stays {
		step("the process that stayed ends, of", func(n *world) { n.Claims[c].Stays = false })
	}
}

// end stops the containers. A call that the kubelet waits for is forgotten.
func (w *world) end(c int) {
	w.Claims[c].Kubelet = ending
	if w.Calls[c][0].Process != 0 && w.Calls[c][1].Process == 0 {
		w.Calls[c][1] = w.Calls[c][0]
	}
	w.Calls[c][0] = call{}
}

func (m *machine) free(w *world, c int) bool {
	for o := range m.Claims {
		if o != c && w.Claims[o].Allocated && m.conflict(o, c) {
			return false
		}
	}
	return true
}

// roomFor reports whether the scheduler finds shares for a claim.
func (m *machine) roomFor(w *world, c int) bool {
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		taken := m.count(c, p)
		for o := range m.Claims {
			if o != c && w.Claims[o].Allocated {
				taken += m.count(o, p)
			}
		}
		if p.Clients > 0 && taken > int(p.Clients) {
			return false
		}
	}
	return true
}

// count is how many shares of a device a claim has.
func (s *Scenario) count(c int, p *device) (n int) {
	s.on(c, p.GPU, func(_ int, q *device) {
		if p.SameDevice(q) {
			n++
		}
	})
	return n
}

// startable reports whether the devices that the spec names exist.
func (m *machine) startable(w *world, c int) bool {
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		if w.GPU[p.GPU].Health == lost || w.Specs[c].Boot != w.Boot {
			return false
		}
		if p.Place != undivided {
			if in := w.GPU[p.GPU].byID(w.Specs[c].IDs[i]); in == nil || in.Compute != 1 {
				return false
			}
		}
		if p.Session != none && w.Sessions[p.Session-1] == 0 {
			return false
		}
	}
	return true
}

// --- calls ---

func (m *machine) calls(w *world, c int, emit emit) {
	k := &w.Claims[c]
	step := func(what string, p int8, v violation, change func(n *world)) {
		next := *w
		change(&next)
		l := on(what, c, -1)
		l.Process = p
		emit(l, &next, v)
	}
	for p := int8(1); p <= int8(m.Processes); p++ {
		if k.Kubelet == wants && w.Calls[c][0].Process == 0 && (p == 2 || !m.Newer[c]) {
			step("Prepare arrives for", p, "", func(n *world) {
				n.Claims[c].Clock++
				n.Calls[c][0] = call{p, n.Claims[c].Clock}
			})
		}
		if k.Kubelet == ending && w.Releases[c].Process == 0 {
			step("Unprepare arrives for", p, "", func(n *world) {
				n.Claims[c].Clock++
				n.Releases[c] = release{Process: p, Arrived: n.Claims[c].Clock}
			})
		}
	}
	for slot, call := range w.Calls[c] {
		if call.Process == 0 {
			continue
		}
		switch {
		case call.Arrived <= w.Tombs[c]:
			step("Prepare is out of date for", call.Process, "", func(n *world) { n.Calls[c][slot].Process, n.Calls[c][slot].Arrived = 0, 0 })
		case m.isReady(w, c, call):
			v := violation("")
			if slot == 0 {
				v = m.owner(w, c)
			}
			step("Prepare succeeds for", call.Process, v, func(n *world) {
				n.Calls[c][slot].Process, n.Calls[c][slot].Arrived = 0, 0
				if slot == 0 {
					n.Claims[c].Kubelet = prepared
				}
			})
		case w.Left.Timeout > 0:
			step("Prepare gives up for", call.Process, "", func(n *world) {
				n.Left.Timeout--
				n.Calls[c][slot].Process, n.Calls[c][slot].Arrived = 0, 0
			})
		}
	}
	m.unprepare(w, c, step)
	m.orphan(w, c, step)
}

// orphan releases a claim that the API server does not know, unless processes use it.
func (m *machine) orphan(w *world, c int, step func(string, int8, violation, func(*world))) {
	r := &w.Records[c]
	if w.Claims[c].Allocated || w.Releases[c].Process != 0 || !r.Exists || r.Phase != isPrepared || w.releasing(c, 0) {
		return
	}
	for p := int8(1); p <= int8(m.Processes); p++ {
		if p == 1 && m.Newer[c] || r.Boot == w.Boot && m.keeps(w, c) {
			continue
		}
		v := violation("")
		if w.holds(c) && slices.ContainsFunc(m.Claims[c], func(d device) bool { return m.isAlone(w, c, &d) }) {
			v = "a claim is released without the kubelet, and its processes are there"
		}
		step("the API server does not know", p, v, func(n *world) {
			n.Claims[c].Clock++
			n.Releases[c] = release{Process: p, Arrived: n.Claims[c].Clock, Late: true}
		})
	}
}

// isAlone reports whether a claim has a device that answers, and of which no other claim has a share.
func (m *machine) isAlone(w *world, c int, p *device) bool {
	for o := range m.Claims {
		if o != c && w.Records[o].Exists && m.shares(o, p) {
			return false
		}
	}
	return !p.Admin && w.GPU[p.GPU].Health == healthy
}

// keeps reports whether processes keep an orphan, or whether that is not known yet.
func (m *machine) keeps(w *world, c int) bool {
	for i := range m.Claims[c] {
		g := m.Claims[c][i].GPU
		switch w.GPU[g].Health {
		case hung, lost:
			continue
		case slow:
			return true
		case healthy:
		}
		if p := &m.Claims[c][i]; m.isAlone(w, c, p) && (w.holds(c) || p.Place == undivided && w.GPU[g].Intruder != nobody || m.users(w, w, int(g), p.Place) != "") {
			return true
		}
	}
	return false
}

// isReady reports whether a Prepare may succeed now: its own task has come to its end, or everything was
// looked at and is there.
func (m *machine) isReady(w *world, c int, k call) bool {
	r, p := &w.Records[c], k.Process
	if !r.Exists || r.Phase != isPrepared || w.releasing(c, p) {
		return false
	}
	if r.Arrived == k.Arrived {
		return !slices.Contains(r.Marks[:], record.Lost)
	}
	for i := range m.Claims[c] {
		m.observe(at(w), p, int(m.Claims[c][i].GPU), &m.view)
		plan := m.decide(m.view)
		if v, found := plan.Verdict(claimNames[c]); !found || v.State != rules.Complete {
			return false
		}
	}
	return true
}

func (m *machine) unprepare(w *world, c int, step func(string, int8, violation, func(*world))) {
	r := &w.Releases[c]
	if r.Process == 0 {
		return
	}
	switch r.Stage {
	case 0:
		step("Unprepare writes the tombstone of", r.Process, "", func(n *world) {
			n.Releases[c].Stage = 1
			if !n.write(true) {
				n.Releases[c].Memory = true
				return
			}
			n.Tombs[c], n.Cleared[c] = max(n.Tombs[c], r.Arrived), 0
		})
	case 1:
		step("Unprepare removes the CDI spec of", r.Process, "", func(n *world) {
			n.Releases[c].Stage = 2
			if !n.Records[c].Exists || n.releasing(c, r.Process) {
				n.Specs[c] = specState{}
			}
		})
	case 2:
		if !r.Memory || !w.Records[c].Exists || !w.releasing(c, r.Process) {
			step("Unprepare succeeds for", r.Process, "", func(n *world) {
				n.Releases[c] = release{}
				if n.Claims[c].Kubelet == ending && !r.Late {
					n.Claims[c].Kubelet, n.Claims[c].Allocated = idle, false
				}
			})
		}
	}
}
