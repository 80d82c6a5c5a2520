// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package conformance examines a GPU node: each assumption that the driver makes about
// hardware, driver and node is a check, which says what is expected, what was observed,
// and whether that holds.
//
// A check learns about the node through Ask only, with the packages that the driver itself
// uses. So each question has a limit of time, is written to the transcript, and can be
// answered from one.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
)

// Check is one assumption of the driver, or several that one look decides.
type Check struct {
	// ID is family.name, in lower case: "node.kernel". Documentation refers to it.
	ID string
	// Assumption is one sentence about what the driver takes for granted.
	Assumption string
	// Code is the file or package of this repository that relies on it.
	Code string
	// Needed is true where the checks after it in its part need what it does.
	Needed bool
	// Run looks. It returns no finding where the node has nothing that the check is about.
	Run func(ctx context.Context, n *Node) []Finding
}

// Verdict is what became of an assumption.
type Verdict string

// Values of Verdict.
const (
	Holds       Verdict = "holds"
	Differs     Verdict = "differs"
	NotTestable Verdict = "not testable"
	// Skipped is for checks that were not to run.
	Skipped Verdict = "skipped"
)

// Finding is what a check has found out about the node or about one GPU.
type Finding struct {
	// Subject is a GPU's PCI address, or the name of something of the node; empty for
	// the node as a whole.
	Subject  string  `json:"subject,omitempty"`
	Expected string  `json:"expected"`
	Observed string  `json:"observed,omitempty"`
	Verdict  Verdict `json:"verdict"`
	// Reason says why it is not testable, or what follows from a difference.
	Reason string `json:"reason,omitempty"`

	// unanswered is true where the node did not answer in time.
	unanswered bool
}

// Expect returns a finding about something that was observed.
func Expect(subject string, ok bool, expected, observed string) Finding {
	f := Finding{Subject: subject, Expected: expected, Observed: observed, Verdict: Holds}
	if !ok {
		f.Verdict = Differs
	}
	return f
}

// Because adds to a difference what follows from it for the user.
func (f Finding) Because(format string, args ...any) Finding {
	if f.Verdict == Differs {
		f.Reason = fmt.Sprintf(format, args...)
	}
	return f
}

// Cannot returns a finding about something that could not be observed.
func Cannot(subject, expected, format string, args ...any) Finding {
	return Finding{Subject: subject, Expected: expected, Verdict: NotTestable, Reason: fmt.Sprintf(format, args...)}
}

// Failed returns a finding for a question that was answered with an error: a difference,
// unless there was no answer in time, or this process may not look.
func Failed(subject, expected string, err error) Finding {
	switch {
	case errors.Is(err, ErrNoAnswer):
		f := Cannot(subject, expected, "%v", err)
		f.unanswered = true
		return f
	case errors.Is(err, fs.ErrPermission):
		return Cannot(subject, expected, "%v", err)
	}
	return Finding{Subject: subject, Expected: expected, Observed: err.Error(), Verdict: Differs}
}
