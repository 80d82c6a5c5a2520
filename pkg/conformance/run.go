// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Part is a set of checks by what they do to the node.
type Part string

// Values of Part, in the order in which they run.
const (
	// ReadOnly changes nothing.
	ReadOnly Part = "read-only"
	// MPS starts MPS programs in a folder of its own and leaves the GPUs as they are.
	MPS Part = "mps"
	// Intrusive changes modes and partitions of one GPU, and undoes that.
	Intrusive Part = "intrusive"
)

// Checks returns the checks of a part in the order in which they run. A new family of
// checks is one more line here.
func Checks(part Part) []Check {
	switch part {
	case ReadOnly:
		return slices.Concat(
			nodeChecks, rootChecks, driverChecks, modeChecks, holderChecks, programChecks, hardwareChecks,
		)
	case MPS:
		return mpsChecks
	case Intrusive:
		return intrusiveChecks
	}
	return nil
}

// ValidateSkip fails for names that are no check, or one that others need.
func ValidateSkip(skip []string) error {
	var names []string
	for _, part := range []Part{ReadOnly, MPS, Intrusive} {
		for _, check := range Checks(part) {
			if check.Needed && slices.Contains(skip, check.ID) {
				return fmt.Errorf("the check %s cannot be skipped: the others of part %s need it", check.ID, part)
			}
			names = append(names, check.ID)
		}
	}
	for _, name := range skip {
		if !slices.Contains(names, name) {
			return fmt.Errorf("there is no check %q: want some of %s", name, strings.Join(names, ", "))
		}
	}
	return nil
}

// run runs a check, unless it is to be skipped.
func (n *Node) run(ctx context.Context, check Check) []Finding {
	if slices.Contains(n.Skip, check.ID) {
		return []Finding{{Verdict: Skipped, Reason: "it was not to run"}}
	}
	return check.Run(ctx, n)
}

// Run runs the checks of all parts that the options name. ctx bounds it: what was not asked
// by then is not testable.
func Run(ctx context.Context, n *Node) *Report {
	report := &Report{Header: n.header}
	n.partA = Checks(ReadOnly)
	for _, part := range n.Parts {
		before := report.Summary
		for _, check := range Checks(part) {
			for _, f := range n.run(ctx, check) {
				report.add(check, f)
			}
		}
		after := report.Summary
		report.untested = report.untested || after.Holds == before.Holds && after.Differs == before.Differs
	}
	return report
}

// add appends a finding and counts it.
func (r *Report) add(c Check, f Finding) {
	r.Results = append(r.Results, Result{Check: c.ID, Assumption: c.Assumption, Code: c.Code, Finding: f})
	switch f.Verdict {
	case Holds:
		r.Summary.Holds++
	case Differs:
		r.Summary.Differs++
	case Skipped:
		r.Summary.Skipped++
	default:
		r.Summary.NotTestable++
	}
	r.unanswered = r.unanswered || f.unanswered
}
