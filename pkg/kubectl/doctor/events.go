// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
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

// events adds what events say to incidents, and what they say else.
func (h *investigation) events() {
	var all findings
	for _, e := range newestFirst(h.Events) {
		isForged := e.InvolvedObject.Kind == "Node" && !h.ofNode(e)
		// What a pod is told its claim is told, too.
		if !h.byDriver(e) || isForged || e.Type != corev1.EventTypeWarning || !h.recent(e) || e.InvolvedObject.Kind == "Pod" {
			continue
		}
		switch c := causeOfEvent(e.Reason); {
		case c.check != "":
		case h.ofNode(e):
			h.aboutNode(&all, e, c)
		case !c.isTainted() || c.claims: // of others the node is told, too
			h.aboutClaim(&all, e, c)
		}
	}
	for _, one := range all {
		if !one.lasts {
			h.past = append(h.past, one)
			continue
		}
		if one.family.free {
			h.deletePods(&one)
		}
		h.others = append(h.others, one)
	}
}

// Untainted says what the driver has told of a GPU with events of its node, and has not published as a taint yet.
func Untainted(m *fleet.Model, now time.Time, events []corev1.Event, g *fleet.GPU) (texts []string) {
	f := &Facts{Model: m, Now: now}
	for i := range events {
		f.Events = append(f.Events, &events[i])
	}
	for _, one := range f.investigate().others {
		if slices.Contains(one.Objects, gpuRef(g)) {
			texts = append(texts, strings.TrimRight(gpuRef(g).Label+": "+one.Message+". "+one.Said, " "))
		}
	}
	return texts
}

func (h *investigation) aboutNode(all *findings, e *corev1.Event, c *cause) {
	node := e.InvolvedObject.Name
	addresses, text := subjectsOf(strings.ReplaceAll(e.Message, evicted, ""))
	if len(addresses) == 0 || c.wholeNode {
		addresses = []string{""}
	}
	for _, address := range addresses {
		about, gpu := h.refAt(node, address)
		of, isOver := c.fault(text)
		if isOver {
			c = heldBack
		}
		one := newTold(e, c, about, text)
		one.family = of.family()
		h.span(&one, e, of, address)
		if in := h.incidents[placeOf(node, address, of)]; in != nil && one.Until == nil {
			in.note(of, isOver, one.Last, text)
			continue
		} else if in != nil { // its taint stays for a moment
			in.note(of, true, nil, "the driver has said that it is over")
		}
		if one.lasts = !c.past && one.Until == nil && !h.isOver(e, c) && (c.isTainted() || gpu == nil); one.lasts && c.isTainted() {
			h.missesTaint(&one, node, address, gpu, text)
		}
		all.addTold(&one)
	}
}

// missesTaint says what it means that the taint which goes with an event is not published.
func (h *investigation) missesTaint(one *Finding, node, address string, g *fleet.GPU, text string) {
	switch {
	case g == nil && (address != "" || !h.publishes(node)):
		one.Severity, one.Remedy = Warning, "If it is not over: "+one.Remedy
		one.Said = said("No ResourceSlice has it, so that it is unknown whether this is over. " + text)
	case !h.hasPublished(node, g, one.Last.Time):
		// A taint that keeps pods away would have been published at once.
		one.Severity = Warning
		one.Said = said("It may still hold: the driver has not said that it is over, and may not have published its taint yet. " + text)
	default:
		one.lasts = false
	}
}

// refAt refers to a GPU, which is nil if it is not published, or without an address to a node.
func (h *investigation) refAt(node, address string) (about Ref, g *fleet.GPU) {
	if address == "" {
		return nodeRef(node), nil
	}
	g, err := h.GPU(node + "/" + address)
	if err != nil {
		return Ref{Kind: "gpu", Name: node + "/" + address}, nil
	}
	return gpuRef(g), g
}

// span sets when the incident of an event began, and when the driver reported its end.
func (h *investigation) span(one *Finding, e *corev1.Event, c *cause, address string) {
	if !e.FirstTimestamp.IsZero() {
		one.Since = &e.FirstTimestamp
	}
	for _, o := range h.Events {
		of, text := subjectsOf(o.Message)
		if !h.ofNode(o) || about(o) != about(e) || !c.endsBy(o.Reason, text) || address != "" && !slices.Contains(of, address) {
			continue
		}
		switch at := (&metav1.Time{Time: fleet.LastSeen(o)}); {
		case at.After(one.Last.Time):
			one.Until = earlier(at, one.Until)
		case at.After(one.Since.Time):
			one.Since = one.Last // before, it was another one
		}
	}
}

// isOverSince reports whether the driver has said after a time that a cause is over at a place, and has not told of it again: a taint that
// keeps nobody away is removed late.
func (h *investigation) isOverSince(at place, c *cause, since *metav1.Time) bool {
	var said, over time.Time
	for _, e := range h.Events {
		of, text := subjectsOf(e.Message)
		if !h.ofNode(e) || e.InvolvedObject.Name != at.node || at.gpu != "" && !slices.Contains(of, at.gpu) {
			continue
		}
		switch seen := fleet.LastSeen(e); {
		case e.Reason == c.event && seen.After(said):
			said = seen
		case c.endsBy(e.Reason, text) && seen.After(over):
			over = seen
		}
	}
	return since != nil && over.After(since.Time) && over.After(said)
}

// hasPublished reports whether the driver had the time to publish the taint that goes with an event, or has written the slices since.
func (h *investigation) hasPublished(node string, g *fleet.GPU, said time.Time) bool {
	isNewer := func(m metav1.ManagedFieldsEntry) bool { return m.Time != nil && m.Time.After(said) }
	isOfGPU := func(d resourceapi.Device) bool { return g == nil || strings.HasPrefix(d.Name, g.Name) }
	return h.Now.Sub(said) >= slowestTaint || !slices.ContainsFunc(h.ofDriver()[poolKey{node, node}], func(s *resourceapi.ResourceSlice) bool {
		return !s.CreationTimestamp.After(said) && !slices.ContainsFunc(s.ManagedFields, isNewer) && slices.ContainsFunc(s.Spec.Devices, isOfGPU)
	})
}

// aboutClaim reports an event about the GPUs that a claim has, or else about the claim. A namespace gets one finding for each cause, because
// its users can write any number of events.
func (h *investigation) aboutClaim(all *findings, e *corev1.Event, c *cause) {
	at, text := about(e), e.Message
	if c.event == "" {
		c, text = &unknown, e.Reason+": "+text
	}
	one := newTold(e, c, at, text)
	one.Remedy += ". Users of namespace " + e.Namespace + " can write such an event, too"
	one.lasts = !c.past && (c.outlivesClaim || h.Hides(claims) || h.Claim(at.Namespace, at.Name) != nil)
	held := slices.DeleteFunc(slices.Clone(h.Holdings), func(o *fleet.Holding) bool {
		return o.Device == nil || o.Claim.Namespace != at.Namespace || o.Claim.Name != at.Name
	})
	if slices.ContainsFunc(held, func(o *fleet.Holding) bool { return strings.Contains(text, o.Device.Name) }) {
		held = slices.DeleteFunc(held, func(o *fleet.Holding) bool { return !strings.Contains(text, o.Device.Name) })
	}
	for _, o := range held {
		of := one
		of.Objects, of.Pods = []Ref{gpuRef(o.Device.GPU)}, podsOf(o, nil)
		if c.untilRestart {
			of.Pods = podsOf(o, one.Last)
			of.lasts = of.lasts && len(of.Pods) > 0
		}
		if in := h.incidents[placeOf(o.Device.GPU.Node.Name, o.Device.GPU.PCIBusID, c)]; in != nil {
			in.Pods = union(in.Pods, of.Pods)
			continue
		}
		all.addTold(&of)
	}
	if len(held) == 0 {
		all.addTold(&one)
	}
}

// newTold is what an event says.
func newTold(e *corev1.Event, c *cause, at Ref, text string) Finding {
	last := &metav1.Time{Time: fleet.LastSeen(e)}
	return Finding{
		Severity: c.severity, Objects: []Ref{at}, Message: strings.ReplaceAll(c.text, " VALUE", ""), Said: said(text), Remedy: c.remedy,
		Since: last, Last: last, family: c.family(),
	}
}

// addTold adds what an event says to what newer ones have said of the same incident.
func (f *findings) addTold(one *Finding) {
	same := slices.IndexFunc(*f, func(o Finding) bool {
		isThere := o.Objects[0] == one.Objects[0] || one.Objects[0].Namespace != "" && o.Objects[0].Namespace == one.Objects[0].Namespace
		return o.family == one.family && o.lasts == one.lasts && isThere && (one.Until == nil || !one.Until.Before(o.Since))
	})
	if same < 0 {
		*f = append(*f, *one)
		return
	}
	o := &(*f)[same]
	o.Objects, o.Pods = union(o.Objects, one.Objects), union(o.Pods, one.Pods)
	o.Since = earlier(o.Since, one.Since)
	if o.Until != nil && o.Until.Before(one.Until) {
		o.Until = one.Until
	}
}

// isOver reports whether the Node of an event says that it is over, or is gone.
func (h *investigation) isOver(e *corev1.Event, c *cause) bool {
	if !h.Hides(nodes) && h.Node(e.InvolvedObject.Name) == nil {
		return true
	}
	return c.event == "CordonedGPUUnknown" && slices.ContainsFunc(h.Nodes, func(n *fleet.Node) bool {
		return n.Name == e.InvolvedObject.Name && n.Object != nil &&
			!slices.ContainsFunc(api.CordonedGPUs(n.Object.Annotations), func(name string) bool { return strings.Contains(e.Message, strconv.Quote(name)) })
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
