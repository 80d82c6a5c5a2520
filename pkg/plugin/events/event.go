// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package events tells people what happens to the GPUs of a node, in Events of Kubernetes.
//
//	event.go     what is told
//	board.go     compares what holds now with what was told: when it begins, while it lasts, and when it is over
//	recorder.go  whom an event is about; users.go finds the pods that use a claim
//	lane.go      counts, limits and writes
package events

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/quote"
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
}

func (e *Event) eventType() string {
	if e.Type == "" {
		return corev1.EventTypeWarning
	}
	return e.Type
}

// Message is the text of the event. The claims are named in those of pods.
func (e *Event) Message(claims ...string) string {
	noun := "device"
	if e.Claim == (claim.Ref{}) {
		noun = "GPU"
	}
	var about []string
	if len(e.Subjects) > 0 {
		about = append(about, quote.Plural(noun, e.Subjects))
	}
	if len(claims) > 0 {
		about = append(about, quote.Plural("claim", claims))
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
func join(all []Event) []Event {
	var joined []Event
	for _, e := range all {
		at := slices.IndexFunc(joined, func(j Event) bool {
			return j.Claim == e.Claim && j.Type == e.Type && j.Reason == e.Reason && j.Text == e.Text && len(j.Subjects) > 0 && len(e.Subjects) > 0
		})
		if at < 0 {
			e.Subjects = slices.Clone(e.Subjects)
			joined = append(joined, e)
			continue
		}
		joined[at].add(e.Subjects)
	}
	return joined
}

// add adds subjects that it does not have.
func (e *Event) add(subjects []string) {
	for _, s := range subjects {
		if !slices.Contains(e.Subjects, s) {
			e.Subjects = append(e.Subjects, s)
		}
	}
}
