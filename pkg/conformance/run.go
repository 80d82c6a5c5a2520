// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"slices"
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

// Run runs the checks of all parts that the options name. ctx bounds it: what was not asked
// by then is not testable.
func Run(ctx context.Context, n *Node) *Report {
	report := &Report{Header: n.header}
	n.partA = Checks(ReadOnly)
	for _, part := range n.Parts {
		before := report.Summary
		for _, check := range Checks(part) {
			for _, f := range check.Run(ctx, n) {
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
	default:
		r.Summary.NotTestable++
	}
	r.unanswered = r.unanswered || f.unanswered
}
