// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

var (
	gpuChecks   = []Check{{ID: "gpus", Title: "nothing is wrong with a GPU", needs: []string{slicesOf}, run: func(f *Facts) findings { return f.told().gpus }}}
	eventChecks = []Check{{
		ID: "driver-events", Title: "the driver warns of nothing that lasts", needs: []string{events, slicesOf, claims}, parts: []string{events, claims},
		run: func(f *Facts) findings { return f.told().others },
	}}
)

// recentTime is how long an event counts. API servers keep events for an hour by default.
const recentTime = time.Hour

// maxReasonEvents is how many events of one reason about claims of a namespace are looked at, and of all reasons that are not known: its users
// can write as many as they want.
const maxReasonEvents = 3

// told is what the driver says with taints and events: one finding for each place and cause.
type told struct {
	// past is over. The newest comes first.
	gpus, others, past findings
}

// place is where an incident is: at a GPU or, without one, at a node.
type place struct {
	node, gpu string
	family    *cause
}

// incident is what taints say of a place.
type incident struct {
	Finding
	gpu *fleet.GPU
	// signs are causes with the values of their taints.
	signs map[*cause]string
	// free says that the pods have to be deleted, unevicted that Kubernetes leaves some of them alone.
	free, unevicted bool
}

// told looks at taints and events, once.
func (f *Facts) told() *told {
	if f.hasTold == nil {
		f.hasTold = &told{}
		h := &hearing{f, f.hasTold, map[place]*incident{}}
		h.taints()
		h.events()
		h.gpus = h.gpuFindings()
	}
	return f.hasTold
}

// hearing finds out what became of what taints and events tell of.
type hearing struct {
	facts *Facts
	*told
	incidents map[place]*incident
}

func placeOf(node, gpu string, c *cause) place {
	if c.wholeNode {
		gpu = ""
	}
	return place{node, gpu, c.family()}
}

// taints finds the incidents that taints tell of. A taint that is not in the table is of a device that is as it should be.
func (h *hearing) taints() {
	for d := range h.facts.Devices() {
		for _, t := range d.Published.Taints {
			name, own := strings.CutPrefix(t.Key, h.facts.Driver+"/")
			c := causeOfTaint(name)
			if !own || c == nil {
				continue
			}
			at := placeOf(d.GPU.Node.Name, d.GPU.PCIBusID, c)
			in := h.incidents[at]
			if in == nil {
				in = &incident{Finding: Finding{Severity: Warning}, gpu: d.GPU, signs: map[*cause]string{}}
				h.incidents[at] = in
			}
			in.add(d, c, &t)
		}
	}
}

func (in *incident) add(d *fleet.Device, c *cause, t *resourceapi.DeviceTaint) {
	in.signs[c] = cmp.Or(in.signs[c], t.Value)
	in.Since = earlier(in.Since, t.TimeAdded)
	keepsAway := t.Effect != resourceapi.DeviceTaintEffectNone
	if keepsAway && c.severity == Error {
		in.Severity = Error
	}
	in.free = in.free || c.free && keepsAway
	for _, h := range d.Held() {
		for _, u := range h.Users() {
			pod := Ref{Kind: u.Resource, Namespace: u.Namespace, Name: u.Name}
			if !c.pods || pod.Kind != "pod" || slices.Contains(in.Pods, pod) {
				continue
			}
			in.Pods = append(in.Pods, pod)
			in.unevicted = in.unevicted || t.Effect == resourceapi.DeviceTaintEffectNoExecute && h.Claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true"
		}
	}
}

func earlier(a, b *metav1.Time) *metav1.Time {
	if a == nil || b != nil && b.Before(a) {
		return b
	}
	return a
}

func (h *hearing) gpuFindings() (found findings) {
	for _, at := range slices.SortedFunc(maps.Keys(h.incidents), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.family.text, b.family.text))
	}) {
		in := h.incidents[at]
		if at.family.wholeNode && h.facts.supervisorDown(at.node) {
			continue // mps-supervisor says so
		}
		var texts []string
		var first *cause
		for i := range causes {
			if value, has := in.signs[&causes[i]]; has {
				first = cmp.Or(first, &causes[i])
				texts = append(texts, strings.ReplaceAll(causes[i].text, "VALUE", cmp.Or(value, "?")))
			}
		}
		one := in.Finding
		one.Message, one.Objects, one.Remedy = strings.Join(texts, ", "), []Ref{gpuRef(in.gpu)}, strings.ReplaceAll(first.remedy, "VALUE", in.signs[first])
		if first.wholeNode {
			one.Objects = []Ref{nodeRef(at.node)}
		}
		if first.pods && h.facts.Hides(fleet.ResourceClaims) {
			one.Message += ". Which pods use it is unknown, as far as claims may not be read"
		}
		if in.unevicted {
			one.Message += ". Kubernetes does not evict pods with extended resources, such as nvidia.com/gpu (kubernetes#141290)"
		}
		if in.free {
			one.Commands = deletePods(in.Pods)
		}
		if first.command != "" {
			one.Commands = append(one.Commands, first.command+" "+in.gpu.Path())
		}
		found = append(found, one)
	}
	return found
}

// supervisorDown reports whether the MPS supervisor of a node is found not to work.
func (f *Facts) supervisorDown(node string) bool {
	if f.namespace == "" || f.Hides(pods) {
		return false
	}
	at := []Ref{nodeRef(node)}
	for _, p := range byNode(f.driverPods(supervisor))[node] {
		at = append(at, refTo("pod", p))
	}
	return slices.ContainsFunc(supervisorsReady(f), func(found Finding) bool {
		return found.Severity == Error && slices.ContainsFunc(at, func(r Ref) bool { return slices.Contains(found.Objects, r) })
	})
}

// deletePods returns the commands that delete pods.
func deletePods(pods []Ref) (commands []string) {
	names := map[string][]string{}
	for _, p := range pods {
		names[p.Namespace] = append(names[p.Namespace], p.Name)
	}
	for _, n := range slices.Sorted(maps.Keys(names)) {
		commands = append(commands, fleet.DeleteCommand("pod", n, names[n]...))
	}
	return commands
}

// events adds what events say to incidents, and what they say else.
func (h *hearing) events() {
	f := h.facts
	heard := map[string]int{} // by reason, and by the namespace whose users could have written them
	for _, e := range newestFirst(f.Events) {
		isForged := e.InvolvedObject.Kind == "Node" && !f.ofNode(e)
		// What a pod is told its claim is told, too.
		if !f.byDriver(e) || isForged || e.Type != corev1.EventTypeWarning || !f.recent(e) || e.InvolvedObject.Kind == "Pod" {
			continue
		}
		c := causeOfEvent(e.Reason)
		if c.check != "" {
			continue
		}
		if f.ofNode(e) {
			h.ofNode(e, c)
		} else if heard[e.Namespace+"/"+c.event]++; heard[e.Namespace+"/"+c.event] <= maxReasonEvents {
			h.ofClaim(e, c)
		}
	}
}

func (h *hearing) ofNode(e *corev1.Event, c *cause) {
	f := h.facts
	node := e.InvolvedObject.Name
	addresses, text := subjectsOf(strings.ReplaceAll(e.Message, evicted, ""))
	if len(addresses) == 0 || c.wholeNode {
		addresses = []string{""}
	}
	for _, address := range addresses {
		in := h.incidents[placeOf(node, address, c)]
		about, isPublished := f.refAt(node, address)
		switch {
		case in != nil:
			in.Said = cmp.Or(in.Said, said(text))
			if in.Since == nil {
				in.Since = &e.FirstTimestamp
			}
		case isPublished || c.past || h.isOver(e, c) || c.isTainted() && address == "" && f.publishes(node):
			h.past.addTold(e, c, about, text)
		default:
			if c.isTainted() {
				text = "No ResourceSlice has it, so that it is unknown whether this is over. " + text
			}
			h.others.addTold(e, c, about, text)
		}
	}
}

// refAt refers to a GPU or, without an address, to a node.
func (f *Facts) refAt(node, address string) (about Ref, isPublished bool) {
	if g, err := f.GPU(node + "/" + address); err == nil {
		return gpuRef(g), true
	}
	if address != "" {
		return Ref{Kind: "gpu", Name: node + "/" + address}, false
	}
	return nodeRef(node), false
}

// ofClaim leaves out what the node is told, too, or what its GPU has a taint for.
func (h *hearing) ofClaim(e *corev1.Event, c *cause) {
	f := h.facts
	at := about(e)
	isTainted := slices.ContainsFunc(f.Holdings, func(o *fleet.Holding) bool {
		return o.Device != nil && o.Claim.Namespace == at.Namespace && o.Claim.Name == at.Name && h.incidents[placeOf(o.Device.GPU.Node.Name, o.Device.GPU.PCIBusID, c)] != nil
	})
	switch {
	case c.taint != "" && !c.claims || isTainted:
	case c.past || f.Claim(at.Namespace, at.Name) == nil && !c.outlivesClaim && !f.Hides(claims):
		h.past.addTold(e, c, at, e.Message)
	default:
		h.others.addTold(e, c, at, e.Message)
	}
}

// addTold adds what an event says, unless a newer one has said it of the same object.
func (f *findings) addTold(e *corev1.Event, c *cause, at Ref, text string) {
	if slices.ContainsFunc(*f, func(o Finding) bool { return o.family == c.family() && o.Objects[0] == at }) {
		return
	}
	one := Finding{
		Severity: c.severity, Objects: []Ref{at}, Message: strings.ReplaceAll(c.text, " VALUE", ""), Said: said(text), Remedy: c.remedy,
		Last: &metav1.Time{Time: fleet.LastSeen(e)}, family: c.family(),
	}
	if at.Namespace != "" {
		one.Remedy += ". Users of namespace " + e.Namespace + " can write such an event, too"
	}
	*f = append(*f, one)
}

// isOver reports whether the driver has said since that it is over, or the Node says so, or is gone.
func (h *hearing) isOver(e *corev1.Event, c *cause) bool {
	f := h.facts
	if !f.Hides(nodes) && f.Node(e.InvolvedObject.Name) == nil {
		return true
	}
	if c.event == "CordonedGPUUnknown" {
		return slices.ContainsFunc(f.Nodes, func(n *fleet.Node) bool {
			return n.Name == e.InvolvedObject.Name && n.Object != nil &&
				!slices.ContainsFunc(api.CordonedGPUs(n.Object.Annotations), func(name string) bool { return strings.Contains(e.Message, strconv.Quote(name)) })
		})
	}
	return c.over != "" && slices.ContainsFunc(f.Events, func(o *corev1.Event) bool {
		return o.Reason == c.over && f.ofNode(o) && about(o) == about(e) && fleet.LastSeen(o).After(fleet.LastSeen(e))
	})
}

// subjectsOf returns the GPUs that an event about a node begins with, and the rest of it.
func subjectsOf(message string) (addresses []string, text string) {
	before, after, found := strings.Cut(message, ": ")
	for _, prefix := range []string{"GPU ", "GPUs "} {
		if list, is := strings.CutPrefix(before, prefix); is && found {
			return strings.Split(list, ", "), after
		}
	}
	return nil, message
}

// evicted is what the driver says of NoExecute. Kubernetes does not evict all, and those that it has evicted are not among the pods.
const evicted = " Pods that use it are evicted; delete those that ask for nvidia.com/gpu."

// byDriver reports whether the driver is named as the reporter of an event. Users who may create events in a namespace can write that, too.
func (f *Facts) byDriver(e *corev1.Event) bool {
	return e.Source.Component == f.Driver || e.ReportingController == f.Driver
}

// ofNode reports whether the driver has reported an event about a node: such events are in the namespace default, which is no tenant's.
func (f *Facts) ofNode(e *corev1.Event) bool {
	return f.byDriver(e) && e.InvolvedObject.Kind == "Node" && e.Namespace == metav1.NamespaceDefault
}

func (f *Facts) recent(e *corev1.Event) bool { return f.Now.Sub(fleet.LastSeen(e)) <= recentTime }

func newestFirst(all []*corev1.Event) []*corev1.Event {
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b *corev1.Event) int { return fleet.LastSeen(b).Compare(fleet.LastSeen(a)) })
	return sorted
}

// about returns the object of an event. Who writes the event may have made up kind and name.
func about(e *corev1.Event) Ref {
	o := e.InvolvedObject
	return Ref{Kind: said(strings.ToLower(o.Kind)), Namespace: o.Namespace, Name: said(o.Name)}
}
