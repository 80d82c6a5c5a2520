// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Kinds of faults, each as often as a scenario allows.
const (
	flaps   = iota // a source appears or vanishes
	outage         // the API server is away
	refusal        // it refuses writes
	skew           // an older server joins the control plane, which is upgraded in the end
	wipe           // the kubelet starts, deletes all slices and registers the plugin
	edit           // somebody takes the taints of a slice away
	removal        // somebody deletes a slice
	stray          // somebody makes a slice of another name
	restore        // etcd is restored from a backup
	blind          // a watch brings nothing any more
	leave          // the node is deleted, with its slices, and registered again
	crash          // an instance ends
	upgrade        // a second instance begins
	policy         // the policy changes
	faults
)

// decider is Decide, or a copy in which a rule is broken.
type decider func(*Want, *Stored, *Memory, Time) Plan

// visit is called for everything that may happen next. broken is a promise that is not kept.
type visit func(text string, next *world, broken string)

// successors calls visit for everything that may happen next.
func (s *scenario) successors(w *world, decide decider, visit visit) {
	busy := false
	for i := range w.p {
		if w.p[i].alive && (w.newest == i || w.p[i].late != nil) && s.processSteps(w, i, decide, visit) {
			busy = true
		}
	}
	s.faultSteps(w, visit)
	if !busy {
		s.timePasses(w, decide, visit)
	}
}

// processSteps are what an instance does, and report whether there is something that comes before time passes.
func (s *scenario) processSteps(w *world, i int, decide decider, visit visit) (busy bool) {
	p := &w.p[i]
	name := fmt.Sprintf("plugin %d: ", i+1)
	if p.late != nil {
		s.send(w, i, p.late, name+"late, ", visit)
		return true
	}
	if !p.heard && !p.blind && w.up {
		n := w.clone()
		n.p[i].heard = true
		n.p[i].m.Reread()
		visit(name+"the watch brings a change", n, "")
		busy = true
	}
	if p.wiped {
		n := w.clone()
		n.p[i].wiped, n.registered = false, true
		n.p[i].m.Registered()
		visit(name+"the kubelet registers it", n, "")
		busy = true
	}
	n := w.clone()
	plan := decide(s.want(n, i), &n.p[i].known, n.p[i].m, n.now)
	switch {
	case plan.Request == nil:
		return busy
	case s.two && plan.Request.Verb != List && w.left[upgrade] > 0:
		late := n.clone()
		late.p[i].late = plan.Request
		visit(name+"is about to write", late, "")
	}
	s.send(n, i, plan.Request, name, visit)
	return true
}

// send carries out a request of an instance, at a server of each kind that there is.
func (s *scenario) send(w *world, i int, request *Request, name string, visit visit) {
	for _, old := range []bool{false, true} {
		if old && !w.mixed {
			continue
		}
		n := w.clone()
		n.p[i].late = nil
		text, broken := s.carryOut(n, i, request, old)
		if broken == "" {
			broken = n.check()
		}
		visit(name+text, n, broken)
	}
}

func (s *scenario) carryOut(w *world, i int, request *Request, old bool) (text, broken string) {
	p := &w.p[i]
	if !w.up || w.refuses && request.Verb != List {
		p.m.Refused(w.now, 0)
		return "a request fails", ""
	}
	if request.Verb == List {
		p.known = Stored{Known: true, Slices: slices.Clone(w.slices)}
		p.heard, p.blind = true, false
		p.m.Listed(w.now)
		return "lists", ""
	}
	at := slices.IndexFunc(w.slices, func(o *resourceapi.ResourceSlice) bool { return o.Name == request.Slice.Name })
	if request.Slice.UID == "" && at >= 0 || request.Slice.UID != "" && (at < 0 || w.slices[at].ResourceVersion != request.Slice.ResourceVersion) {
		p.m.Reread()
		p.m.Refused(w.now, 0)
		return "conflict at slice " + request.Slice.Name, ""
	}
	if s.bound > 0 {
		if w.writes++; w.writes > s.bound {
			return "writes", fmt.Sprintf("more than %d writes, less one in %d steps", s.bound, s.leak)
		}
	}
	if at >= 0 && w.newest == i {
		broken = s.takesAway(w, w.slices[at], request)
	}
	w.slices = slices.DeleteFunc(w.slices, func(o *resourceapi.ResourceSlice) bool { return o.Name == request.Slice.Name })
	known := slices.DeleteFunc(slices.Clone(p.known.Slices), func(o *resourceapi.ResourceSlice) bool { return o.Name == request.Slice.Name })
	w.changed(i)
	if request.Verb == Delete {
		p.known.Slices = known
		p.m.Deleted(request.Slice.Name, w.now)
		return "deletes " + request.Slice.Name, broken
	}
	stored := request.Slice.DeepCopy()
	for i := range stored.Spec.Devices {
		if d := &stored.Spec.Devices[i]; len(d.Taints) > s.maxTaints() {
			return "writes", fmt.Sprintf("device %s has %d taints, which the API server refuses", d.Name, len(d.Taints))
		}
	}
	stored.UID, stored.ResourceVersion = types.UID(fmt.Sprint("uid-", w.version)), strconv.Itoa(w.version)
	text = fmt.Sprintf("writes %s in generation %d: %s", stored.Name, stored.Spec.Pool.Generation, content(stored))
	dropped := old && s.drop(stored, request.Slice.UID != "" && at >= 0)
	w.slices, p.known.Slices = append(w.slices, stored), append(known, stored)
	p.m.Wrote(request, stored.ResourceVersion, w.now)
	if dropped {
		text += "; an older server drops fields"
		p.m.Refused(w.now, 0)
	}
	return text, broken
}

// drop is what an older server does: it drops fields of what is created. An update keeps those that the slice had; whether it
// had some is taken for so of all updates of counters and shares, which never lack them, and of no update of taints.
func (s *scenario) drop(stored *resourceapi.ResourceSlice, isUpdate bool) (dropped bool) {
	if s.drops != "taints" && isUpdate {
		return false
	}
	if s.drops == "counters" {
		dropped, stored.Spec.SharedCounters = len(stored.Spec.SharedCounters) > 0, nil
	}
	for i := range stored.Spec.Devices {
		d := &stored.Spec.Devices[i]
		switch s.drops {
		case "counters":
			dropped, d.ConsumesCounters = dropped || len(d.ConsumesCounters) > 0, nil
		case "shares":
			dropped, d.AllowMultipleAllocations = dropped || d.AllowMultipleAllocations != nil, nil
		default:
			dropped, d.Taints = dropped || len(d.Taints) > 0, nil
		}
	}
	return dropped
}

// takesAway asserts that a taint that keeps pods away is not taken away as long as somebody says it.
func (s *scenario) takesAway(w *world, was *resourceapi.ResourceSlice, request *Request) string {
	if request.Verb == Delete {
		return ""
	}
	for i := range was.Spec.Devices {
		d := &was.Spec.Devices[i]
		at := slices.IndexFunc(request.Slice.Spec.Devices, func(o resourceapi.Device) bool { return o.Name == d.Name })
		if at < 0 {
			continue
		}
		for k, src := range s.sources {
			if w.said[k] && src.concerns(d) && keepsAway(src.effect) && s.keptAway(d, &src) && !s.keptAway(&request.Slice.Spec.Devices[at], &src) {
				return "taint " + src.key + " is taken away although it is said"
			}
		}
	}
	return ""
}

// changed says that the API server has something new, for all but one instance.
func (w *world) changed(by int) {
	w.version++
	for i := range w.p {
		if i != by {
			w.p[i].heard = false
		}
	}
}

// faultSteps are what happens to the cluster.
func (s *scenario) faultSteps(w *world, visit visit) {
	fault := func(kind int, text string, change func(*world)) {
		if w.left[kind] > 0 {
			n := w.clone()
			n.left[kind]--
			n.registered = false
			change(n)
			visit(text, n, n.check())
		}
	}
	for k, src := range s.sources {
		if s.flap || w.left[flaps] > 0 {
			n := w.clone()
			if !s.flap {
				n.left[flaps]--
			}
			n.said[k] = !n.said[k]
			n.since[k] = n.now
			visit(fmt.Sprintf("source %s appears or vanishes", src.key), n, "")
		}
	}
	if w.up {
		fault(outage, "the API server goes away", func(n *world) { n.up = false })
	} else {
		n := w.clone()
		n.up = true
		visit("the API server comes back", n, "")
	}
	if w.refuses {
		n := w.clone()
		n.refuses = false
		visit("the API server takes writes again", n, "")
	} else {
		fault(refusal, "the API server refuses writes", func(n *world) { n.refuses = true })
	}
	if w.mixed {
		n := w.clone()
		n.mixed = false
		visit("the older server is upgraded", n, "")
	} else {
		fault(skew, "an older server joins", func(n *world) { n.mixed = true })
	}
	if w.left[restore] > 0 && !w.backedUp {
		n := w.clone()
		n.backup, n.backedUp = slices.Clone(n.slices), true
		visit("a backup is made", n, "")
	} else if !w.restored {
		fault(restore, "etcd is restored", func(n *world) {
			n.slices, n.backup, n.restored, n.meddled = n.backup, nil, true, true
			n.changed(-1)
			for i := range n.p {
				n.p[i].blind = true
			}
		})
	}
	s.strangerSteps(w, fault)
	s.instanceSteps(w, fault)
	fault(policy, "the policy changes", func(n *world) { n.policy = !n.policy })
}

func (s *scenario) strangerSteps(w *world, fault func(int, string, func(*world))) {
	fault(blind, "the watch brings nothing any more", func(n *world) { n.p[n.newest].blind = true })
	if w.p[0].alive && !w.p[0].wiped {
		fault(wipe, "the kubelet deletes all slices", func(n *world) {
			n.slices = nil
			n.changed(-1)
			n.p[n.newest].wiped = n.p[n.newest].alive
		})
	}
	fault(leave, "the node leaves and comes back", func(n *world) {
		n.owner++
		n.meddled = true
	})
	for at, was := range w.slices {
		fault(removal, "somebody deletes "+was.Name, func(n *world) {
			n.slices = slices.Delete(n.slices, at, at+1)
			n.meddled = true
			n.changed(-1)
		})
		if len(was.Spec.Devices) == 0 {
			continue
		}
		fault(edit, "somebody takes the taints of "+was.Name, func(n *world) {
			n.changed(-1)
			changed := was.DeepCopy()
			changed.ResourceVersion = strconv.Itoa(n.version)
			for i := range changed.Spec.Devices {
				changed.Spec.Devices[i].Taints = nil
			}
			n.slices[at], n.meddled = changed, true
		})
		if strings.HasPrefix(was.Name, "1") {
			fault(stray, "somebody copies "+was.Name, func(n *world) {
				n.changed(-1)
				copied := was.DeepCopy()
				copied.Name, copied.UID, copied.ResourceVersion = "stray", "uid-stray", strconv.Itoa(n.version)
				n.slices, n.meddled = append(n.slices, copied), true
			})
		}
	}
}

func (s *scenario) instanceSteps(w *world, fault func(int, string, func(*world))) {
	for i := range w.p {
		switch other := 1 - i; {
		case w.p[i].alive:
			fault(crash, fmt.Sprintf("plugin %d ends", i+1), func(n *world) {
				n.p[i] = process{}
				if n.newest = other; !n.p[other].alive {
					n.begin(i)
					return
				}
				n.p[other].m.Reread()
			})
		case s.two:
			fault(upgrade, fmt.Sprintf("plugin %d begins", i+1), func(n *world) { n.begin(i) })
		}
	}
}

// timePasses asserts what holds then: what keeps pods away does not wait, and the rules have said when they have to be asked
// again.
func (s *scenario) timePasses(w *world, decide decider, visit visit) {
	broken := ""
	n := w.clone() // with what the rules remember of having been asked
	i := w.newest
	if p := &n.p[i]; p.alive {
		plan := decide(s.want(w, i), &p.known, p.m, w.now)
		later := decide(s.want(w, i), &p.known, p.m.clone(), w.now+1)
		if later.Request != nil && plan.Next > w.now+1 {
			broken = fmt.Sprintf("a request is due and the rules have not said so: %s", later.Request.text())
		}
		calm := w.up && !w.refuses && !w.mixed && p.heard && !p.blind && !w.meddled && !p.wiped && !p.m.unread
		if accurate := p.heard && !p.blind && !p.m.unread; plan.Published && accurate {
			orphaned := slices.ContainsFunc(w.slices, func(o *resourceapi.ResourceSlice) bool { return o.OwnerReferences[0].UID != w.nodeUID() })
			if v := s.isOffered(w, nil); v != "" || orphaned || len(w.slices) != len(s.want(w, i).Slices) {
				broken = fmt.Sprintf("%d slices are reported as published, of a node that is gone: %v. %s", len(w.slices), orphaned, v)
			}
		}
		if w.registered && w.up && !w.refuses && !w.mixed && p.m.retryAt <= w.now && len(w.slices) < len(s.want(w, i).Slices) {
			broken = "the kubelet has registered the plugin, and a slice is missing"
		}
		if calm && p.m.retryAt <= w.now {
			if v := s.isOffered(w, nil); v != "" && broken == "" {
				broken = v + " although the API server takes it"
			}
		}
	}
	for k, src := range s.sources {
		if w.said[k] && w.since[k] > n.p[i].m.triedAt && s.isOffered(w, &src) != "" {
			broken = "what is news waits for its turn: " + src.key
		}
	}
	n.now++
	if s.bound > 0 && n.now-n.writesAt >= s.leak {
		n.writes, n.writesAt = max(n.writes-1, 0), n.now
	}
	for k := range n.said {
		if n.said[k] {
			n.gone[k] = n.now
		}
	}
	if s.right(n, n.newest) == "" {
		n.meddled = false
	}
	// The garbage collector takes its time.
	if n.now%3 == 0 {
		n.slices = slices.DeleteFunc(n.slices, func(o *resourceapi.ResourceSlice) bool { return o.OwnerReferences[0].UID != n.nodeUID() })
		if len(n.slices) != len(w.slices) {
			n.changed(-1)
		}
	}
	// A watch that brings nothing ends some time, and the next one begins with a list.
	for i := range n.p {
		if p := &n.p[i]; p.blind && n.up && n.now%4 == 0 {
			p.blind = false
		}
	}
	visit("time passes", n, broken)
}

// keptAway reports whether a device has the taint of a source, or, where it can have few, another one that is as strong.
func (s *scenario) keptAway(d *resourceapi.Device, src *source) bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
		return t.Key == src.key || s.few > 0 && rank(t.Effect) >= rank(src.effect)
	})
}

// isOffered says which device is offered although a source, or any for nil, says what keeps pods away.
func (s *scenario) isOffered(w *world, only *source) string {
	for _, is := range w.slices {
		for k := range is.Spec.Devices {
			d := &is.Spec.Devices[k]
			for n, src := range s.sources {
				if w.said[n] && (only == nil || src == *only) && src.concerns(d) && keepsAway(src.effect) && !s.keptAway(d, &src) {
					return fmt.Sprintf("device %s is offered without taint %s", d.Name, src.key)
				}
			}
		}
	}
	return ""
}

func (r *Request) text() string {
	if r.Slice == nil {
		return "a list"
	}
	return r.Slice.Name
}
