// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

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
		if a := k.Queue[0]; needsGPU(a.Do) && w.GPU[a.GPU].Health == hung {
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
					if k := &n.Work[i]; k.Process != 0 && needsGPU(k.Queue[0].Do) && int(k.Queue[0].GPU) == g {
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
		if k.Process != 0 && !k.Stuck && needsGPU(k.Queue[0].Do) && int(k.Queue[0].GPU) == g && w.GPU[g].Health == hung {
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
