// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package events tells people what happens to the GPUs of a node, in Events of Kubernetes.
//
//	event.go     what is told
//	board.go     compares what holds now with what was told: when it begins, while it lasts, and when it is over
//	recorder.go  writes it: about the node, about claims, and about the pods that use them
package events

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Event is something that people should read.
type Event struct {
	// Claim is the claim that it is about, which the pods that use it are told, too. The zero value is the node.
	Claim claim.Ref
	// Type is corev1.EventTypeWarning if it is empty.
	Type   string
	Reason string
	// Subjects are the GPUs of the node, by PCI address, or the devices of the claim that it is about. The message begins with
	// them. Without any the text says what it is about.
	Subjects []string
	// Text says what has happened and what to do.
	Text string

	// pod uses the claim, and is told of it, unless it is the zero value.
	pod corev1.ObjectReference
}

func (e *Event) eventType() string { return cmp.Or(e.Type, corev1.EventTypeWarning) }

// Message is the text of the event.
func (e *Event) Message() string {
	var about []string
	switch {
	case len(e.Subjects) == 0:
	case e.Claim == (claim.Ref{}):
		about = append(about, quote.Plural("GPU", e.Subjects))
	default:
		about = append(about, quote.Plural("device", e.Subjects))
	}
	switch {
	case e.pod.Name != "":
		about = append(about, "claim "+quote.Name(e.Claim.Name))
	case e.Claim.Name == "" && e.Claim.UID != "": // its name is not known
		about = append(about, "claim with UID "+quote.Name(e.Claim.UID))
	}
	if len(about) == 0 {
		return e.Text
	}
	subject := strings.Join(about, " of ")
	return strings.ToUpper(subject[:1]) + subject[1:] + ": " + e.Text
}

// String is for tests and logs.
func (e *Event) String() string {
	text := e.Reason + ": " + e.Message()
	if e.Claim.Name != "" {
		text = e.Claim.Name + ": " + text
	}
	return text
}

// join makes one event of those that say the same of several GPUs or devices.
func join(all []Event) (joined []Event) {
	for _, e := range all {
		at := slices.IndexFunc(joined, func(j Event) bool {
			return j.Claim == e.Claim && j.Type == e.Type && j.Reason == e.Reason && j.Text == e.Text && len(j.Subjects) > 0 && len(e.Subjects) > 0
		})
		if at < 0 {
			joined = append(joined, e)
			continue
		}
		subjects := slices.Concat(joined[at].Subjects, e.Subjects)
		slices.Sort(subjects)
		joined[at].Subjects = slices.Compact(subjects)
	}
	return joined
}
