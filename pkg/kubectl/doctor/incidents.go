// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// recentTime is how long an event counts. API servers keep events for an hour by default.
const recentTime = time.Hour

// slowestTaint is how long the driver may take to publish a taint that keeps nobody away (docs/design/publishing.md).
const slowestTaint = 10 * time.Minute

// place is where an incident is: at a GPU or, without one, at a node.
type place struct {
	node, gpu string
	family    *cause
}

// incident is what taints say of a place.
type incident struct {
	Finding
	at  place
	gpu *fleet.GPU
	// signs are causes with their taints.
	signs map[*cause]sign
	// observers are pods that only look at the GPU. It does not help to delete them: what is made again looks at the same one.
	observers []Ref
	// unevicted says that Kubernetes leaves some of the pods alone.
	unevicted bool
}

type sign struct {
	value            string
	keepsAway, noted bool
}

// investigate looks at taints and events, once.
func (f *Facts) investigate() *investigation {
	if f.investigation == nil {
		f.investigation = &investigation{Facts: f, incidents: map[place]*incident{}}
		f.investigation.taints()
		f.investigation.events()
		f.investigation.gpus = f.investigation.gpuFindings()
	}
	return f.investigation
}

// investigation finds out what became of what taints and events tell of: one finding for each place and cause.
type investigation struct {
	*Facts

	incidents map[place]*incident
	// past is over. The newest comes first.
	gpus, others, past findings
}

func placeOf(node, gpu string, c *cause) place {
	if c.wholeNode {
		gpu = ""
	}
	return place{node, gpu, c.family()}
}

// taints finds the incidents that taints tell of. A taint that is not in the table is of a device that is as it should be.
func (h *investigation) taints() {
	for d := range h.Devices() {
		for _, t := range d.Published.Taints {
			name, own := strings.CutPrefix(t.Key, h.Driver+"/")
			c := causeOfTaint(name)
			if !own || c == nil {
				continue
			}
			at := placeOf(d.GPU.Node.Name, d.GPU.PCIBusID, c)
			if t.Effect == resourceapi.DeviceTaintEffectNone && h.isOverSince(at, c, t.TimeAdded) {
				continue
			}
			if h.incidents[at] == nil {
				h.incidents[at] = &incident{at: at, gpu: d.GPU, signs: map[*cause]sign{}}
			}
			h.incidents[at].add(d, c, &t)
		}
	}
	for at, in := range h.incidents {
		fault := h.incidents[place{at.node, at.gpu, &causes[0]}]
		if at.family.follows && fault != nil && fault.severity() == Error {
			maps.Copy(fault.signs, in.signs)
			h.incidents[at] = fault
		}
	}
}

func (in *incident) add(d *fleet.Device, c *cause, t *resourceapi.DeviceTaint) {
	was := in.signs[c]
	in.signs[c] = sign{value: cmp.Or(was.value, t.Value), keepsAway: was.keepsAway || t.Effect != resourceapi.DeviceTaintEffectNone}
	in.Since = earlier(in.Since, t.TimeAdded)
	if device.Reason(c.taint).IsFailure() { // other faults are those of programs, and an observer has no taint that tells
		in.observers = union(in.observers, observersOf(d.GPU))
	}
	for _, h := range d.Held() {
		if pods := podsOf(h, nil); c.pods && len(pods) > 0 {
			in.Pods = union(in.Pods, pods)
			in.unevicted = in.unevicted || t.Effect == resourceapi.DeviceTaintEffectNoExecute && h.Claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true"
		}
	}
}

// observersOf returns the pods that only look at a GPU.
func observersOf(g *fleet.GPU) (pods []Ref) {
	for _, d := range g.Devices {
		for _, h := range d.Holdings {
			if h.Admin() {
				pods = append(pods, podsOf(h, nil)...)
			}
		}
	}
	return pods
}

// podsOf returns the pods that use what a claim has: with a time, those of which containers run that had started before.
func podsOf(h *fleet.Holding, before *metav1.Time) (pods []Ref) {
	for _, u := range h.Users() {
		if u.Resource == "pod" && (before == nil || u.Pod == nil || fleet.RunsSince(u.Pod, before.Time)) {
			pods = append(pods, Ref{Kind: u.Resource, Namespace: u.Namespace, Name: u.Name})
		}
	}
	return pods
}

func union(a, b []Ref) []Ref {
	for _, r := range b {
		if !slices.Contains(a, r) {
			a = append(a, r)
		}
	}
	return a
}

// severity is that of the worst sign. What keeps nobody away is no error.
func (in *incident) severity() Severity {
	worst := OK
	for c, s := range in.signs {
		is := c.severity
		if is == Error && !s.keepsAway {
			is = Warning
		}
		if is.rank() < worst.rank() {
			worst = is
		}
	}
	return worst
}

// note takes what an event says of one of the signs; newer ones come first. What is over may keep its taint for a time. An older event may
// be of an earlier incident, so that the taint says when this one began, or the newest event where the taint is late.
func (in *incident) note(c *cause, isOver bool, at *metav1.Time, text string) {
	if s, is := in.signs[c]; is && isOver && !s.noted && !s.isOther(text) {
		delete(in.signs, c)
		c, in.signs[heldBack] = heldBack, sign{keepsAway: true}
	}
	if s, is := in.signs[c]; is && (!isOver || c == heldBack) {
		if in.Since == nil || at != nil && !s.keepsAway && !s.noted && in.Since.Sub(at.Time) <= slowestTaint {
			in.Since = earlier(in.Since, at)
		}
		s.noted = true
		in.signs[c], in.Said = s, cmp.Or(in.Said, said(text))
	}
}

// isOther reports whether an event about an XID is about another one than the taint.
func (s sign) isOther(text string) bool {
	return strings.Contains(text, "XID ") && !strings.Contains(text, "XID "+s.value+" ")
}

func earlier(a, b *metav1.Time) *metav1.Time {
	if a == nil || b != nil && b.Before(a) {
		return b
	}
	return a
}

func (h *investigation) gpuFindings() (found findings) {
	for _, at := range slices.SortedFunc(maps.Keys(h.incidents), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.family.text, b.family.text))
	}) {
		in := h.incidents[at]
		if at != in.at || at.family.wholeNode && h.supervisorDown(at.node) {
			continue // it is part of another one, or mps-supervisor says so
		}
		var texts []string
		var first *cause
		free := false
		for i := range causes {
			if s, has := in.signs[&causes[i]]; has {
				first = cmp.Or(first, &causes[i])
				texts = append(texts, strings.ReplaceAll(causes[i].text, "VALUE", cmp.Or(s.value, "?")))
				free = free || causes[i].free && s.keepsAway
			}
		}
		one := in.Finding
		one.Severity, one.Objects = in.severity(), []Ref{gpuRef(in.gpu)}
		one.Message, one.Remedy = strings.Join(texts, ", "), strings.ReplaceAll(first.remedy, "VALUE", in.signs[first].value)
		if first.wholeNode {
			one.Objects = []Ref{nodeRef(at.node)}
		}
		if first.pods && h.Hides(fleet.ResourceClaims) {
			one.Message += ". Which pods use it is unknown, as far as claims may not be read"
		}
		if in.unevicted {
			one.Message += ". Kubernetes does not evict pods with extended resources, such as nvidia.com/gpu (kubernetes#141290)"
		}
		if free {
			h.deletePods(&one)
		}
		one.Pods = union(one.Pods, in.observers)
		if first.command != "" {
			one.Commands = append(one.Commands, first.command+" "+in.gpu.Path())
		}
		found = append(found, one)
	}
	return found
}

// supervisorDown reports whether the MPS supervisor of a node is found not to work.
func (h *investigation) supervisorDown(node string) bool {
	if h.namespace == "" || h.Hides(pods) {
		return false
	}
	at := []Ref{nodeRef(node)}
	for _, p := range byNode(h.driverPods(supervisor))[node] {
		at = append(at, refTo("pod", p))
	}
	return slices.ContainsFunc(supervisorsReady(h.Facts), func(found Finding) bool {
		return found.Severity == Error && slices.ContainsFunc(at, func(r Ref) bool { return slices.Contains(found.Objects, r) })
	})
}

// deletePods adds the commands that delete the pods of a finding, and which of them nobody makes again.
func (h *investigation) deletePods(of *Finding) {
	names := map[string][]string{}
	var bare []Ref
	for _, p := range of.Pods {
		names[p.Namespace] = append(names[p.Namespace], p.Name)
		if slices.ContainsFunc(h.Pods, func(o *corev1.Pod) bool { return refTo("pod", o) == p && metav1.GetControllerOf(o) == nil }) {
			bare = append(bare, p)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(names)) {
		of.Commands = append(of.Commands, fleet.DeleteCommand("pod", n, names[n]...))
	}
	if len(bare) > 0 {
		of.Remedy += ". No controller makes " + objects(bare, false) + " again: keep the manifest"
	}
}
