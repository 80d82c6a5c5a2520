// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var eventChecks = []Check{
	{ID: "driver-events", Title: "the driver has warned of nothing within an hour", needs: []string{events}, parts: []string{events}, run: driverEvents},
}

// recentTime is how long an event counts. API servers keep events for an hour by default.
const recentTime = time.Hour

// byDriver reports whether the driver is named as the reporter of an event. Users who may create events in a namespace can write that, too.
func (f *Facts) byDriver(e *corev1.Event) bool {
	return e.Source.Component == f.Driver || e.ReportingController == f.Driver
}

// ofNode reports whether the driver has reported an event about a node: such events are in the namespace default, which is no tenant's.
func (f *Facts) ofNode(e *corev1.Event) bool {
	return f.byDriver(e) && e.InvolvedObject.Kind == "Node" && e.Namespace == metav1.NamespaceDefault
}

func (f *Facts) recent(e *corev1.Event) bool { return f.Now.Sub(lastSeen(e)) <= recentTime }

// lastSeen returns when what an event reports was observed last.
func lastSeen(e *corev1.Event) time.Time {
	seen := e.LastTimestamp.Time
	if e.Series != nil && e.Series.LastObservedTime.After(seen) {
		seen = e.Series.LastObservedTime.Time
	}
	for _, t := range []time.Time{e.EventTime.Time, e.CreationTimestamp.Time} {
		if seen.IsZero() {
			seen = t
		}
	}
	return seen
}

// shownElsewhere are the reasons of events that other checks look at.
var shownElsewhere = []string{eventPolicyInvalid, eventUnknownProfiles, eventLeftOut, eventCrashes}

// maxReasonMessages is how many different messages of one reason are shown.
const maxReasonMessages = 3

func driverEvents(f *Facts) (found findings) {
	shown := map[string]int{} // by reason, and by the namespace whose users could have written them
	for _, e := range newestFirst(f.Events) {
		isForged := e.InvolvedObject.Kind == "Node" && !f.ofNode(e)
		if !f.byDriver(e) || isForged || e.Type != corev1.EventTypeWarning || !f.recent(e) || slices.Contains(shownElsewhere, e.Reason) {
			continue
		}
		message := fmt.Sprintf("%s: %s", e.Reason, said(e.Message))
		known := slices.ContainsFunc(found, func(other Finding) bool { return other.Message == message })
		if !known {
			key := e.Namespace + "/" + e.Reason
			if shown[key]++; shown[key] > maxReasonMessages {
				continue
			}
		}
		remedy := "Do what the event says; docs/how-to/troubleshoot.md goes by its name"
		if !f.ofNode(e) {
			remedy = "docs/how-to/troubleshoot.md has what to do by the event's name. Users of namespace " + e.Namespace + " can write such an event, too"
		}
		found.add(Warning, message, remedy, about(e))
	}
	return found
}

func newestFirst(all []*corev1.Event) []*corev1.Event {
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b *corev1.Event) int { return lastSeen(b).Compare(lastSeen(a)) })
	return sorted
}

// about returns the object of an event.
func about(e *corev1.Event) Ref {
	o := e.InvolvedObject
	kinds := map[string]string{"Node": "node", "Pod": "pod", "ResourceClaim": "resourceclaim"}
	kind, known := kinds[o.Kind]
	if !known {
		kind = o.Kind
	}
	return Ref{Kind: kind, Namespace: o.Namespace, Name: o.Name}
}
