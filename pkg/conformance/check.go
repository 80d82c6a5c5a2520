// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package conformance examines a GPU node: each assumption that the driver makes about
// hardware, driver and node is a check, which says what is expected, what was observed,
// and whether that holds.
//
// A fact (facts.go) is a question to the node, and an act (act_*.go) is one that starts or
// changes something and says what was seen. Both use the packages that the driver uses, have
// a limit of time, are written to the transcript, and can be answered from one. A check
// (checks_*.go) judges their answers and reaches nothing else, so that a transcript gives the
// same report as the node. It asks through an inquiry (ask.go), which keeps the first error: after
// that nothing more is asked, and the error becomes the finding. So checks need not handle errors,
// unless one says something else to them.
package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Check is one assumption of the driver, or several that one observation decides.
type Check struct {
	// ID is family.name, in lower case: "node.kernel". Documentation refers to it.
	ID string
	// Assumption is one sentence about what the driver takes for granted.
	Assumption string
	// Expected is what its findings expect, and So what follows for the user from a
	// difference. A finding may say something else.
	Expected, So string
	// Code is the file or package of this repository that relies on it.
	Code string
	// Needed is true where the checks after it in its part need what it does.
	Needed bool
	// SoOfErrors is true where So follows from an error, too.
	SoOfErrors bool

	// find judges. It returns no finding where the node has nothing that the check is about.
	find func(*inquiry) []Finding
}

// run returns the findings, complete.
func (c *Check) run(ctx context.Context, n *Node) []Finding {
	if slices.Contains(n.header.Skip, c.ID) {
		return []Finding{{Verdict: Skipped, Reason: "it was not to run"}}
	}
	findings := []Finding{n.missing}
	if n.missing.Verdict == "" {
		q := &inquiry{ctx: ctx, Node: n}
		if findings = c.find(q); q.err != nil {
			findings = []Finding{failed(q.err)}
		}
	}
	for i := range findings {
		f := &findings[i]
		f.Expected = cmp.Or(f.Expected, c.Expected)
		if f.Verdict == Differs && (c.SoOfErrors || !f.failed) {
			f.Reason = cmp.Or(f.Reason, c.So)
		}
	}
	return findings
}

// Verdict is what became of an assumption.
type Verdict string

// Values of Verdict.
const (
	Holds       Verdict = "holds"
	Differs     Verdict = "differs"
	NotTestable Verdict = "not testable"
	Skipped     Verdict = "skipped" // it was not to run
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

	// failed is true where a question was answered with an error, and unanswered where the
	// node did not answer in time.
	failed, unanswered bool
}

// expect returns a finding about something that was observed.
func expect(ok bool, format string, args ...any) Finding {
	f := Finding{Observed: fmt.Sprintf(format, args...), Verdict: Holds}
	if !ok {
		f.Verdict = Differs
	}
	return f
}

// cannot returns a finding about something that could not be observed.
func cannot(format string, args ...any) Finding {
	return Finding{Verdict: NotTestable, Reason: fmt.Sprintf(format, args...)}
}

// failed returns a finding for a question that was answered with an error: a difference,
// unless there was no answer in time, or this process may not look.
func failed(err error) Finding {
	f := Finding{Observed: err.Error(), Verdict: Differs, failed: true}
	if f.unanswered = errors.Is(err, ErrNoAnswer); f.unanswered || errors.Is(err, fs.ErrPermission) {
		f.Verdict, f.Observed, f.Reason = NotTestable, "", err.Error()
	}
	return f
}

// because says what follows from a difference.
func (f Finding) because(format string, args ...any) Finding {
	if f.Verdict == Differs {
		f.Reason = fmt.Sprintf(format, args...)
	}
	return f
}

// withSubject names the subject, unless there is one.
func (f Finding) withSubject(subject string) Finding {
	f.Subject = cmp.Or(f.Subject, subject)
	return f
}

// anew returns an inquiry that nothing has failed for yet.
func (q *inquiry) anew() *inquiry { return &inquiry{ctx: q.ctx, Node: q.Node} }

// on returns the finding about a subject: what was judged, or the first error. The zero value stands for none.
// After an error of the inquiry itself nothing more is asked.
func (q *inquiry) on(subject string, judge func(*inquiry) Finding) []Finding {
	own := q.anew()
	own.err = q.err
	f := judge(own)
	if own.err != nil {
		subject, expected := f.Subject, f.Expected
		f = failed(own.err).withSubject(subject)
		f.Expected = expected
	}
	if f.Verdict == "" {
		return nil
	}
	return []Finding{f.withSubject(subject)}
}

// one makes one finding.
func one(judge func(*inquiry) Finding) func(*inquiry) []Finding {
	return func(q *inquiry) []Finding { return q.on("", judge) }
}

// judge judges one fact.
func judge[T any](f fact[T], judge func(T) Finding) func(*inquiry) []Finding {
	return one(func(q *inquiry) Finding { return judge(f.of(q)) })
}

// eachGPU judges each GPU that can be read. A node whose GPUs cannot be read is one finding;
// driver.nvml says why.
func eachGPU(judge func(*inquiry, *gpu.GPU) Finding) func(*inquiry) []Finding {
	return func(q *inquiry) (findings []Finding) {
		node, err := gpus.try(q)
		if err != nil {
			f := cannot("the GPUs cannot be read: %v", err)
			f.unanswered = errors.Is(err, ErrNoAnswer)
			return []Finding{f}
		}
		for _, g := range node.GPUs {
			findings = append(findings, q.on(g.PCIAddress, func(q *inquiry) Finding { return judge(q, &g) })...)
		}
		return findings
	}
}

// Part is a set of checks by what they do to the node.
type Part string

// Values of Part.
const (
	ReadOnly  Part = "read-only" // changes nothing
	MPS       Part = "mps"       // starts MPS programs in a folder of its own and leaves the GPUs as they are
	Intrusive Part = "intrusive" // changes modes and partitions of one GPU, and undoes that
)

// Parts are all, in the order in which they run.
var Parts = []Part{ReadOnly, MPS, Intrusive}

// readOnlyChecks are all that the read-only part has. A new family of checks is one more name here.
var readOnlyChecks = slices.Concat(nodeChecks, rootChecks, driverChecks, modeChecks, holderChecks, programChecks, hardwareChecks)

// Checks returns the checks of a part in the order in which they run.
func Checks(part Part) []Check {
	return map[Part][]Check{ReadOnly: readOnlyChecks, MPS: mpsChecks, Intrusive: intrusiveChecks}[part]
}

// ValidateSkip fails for names that are no check, or one that others need.
func ValidateSkip(skip []string) error {
	unknown, names := slices.Clone(skip), []string{}
	for _, part := range Parts {
		for _, check := range Checks(part) {
			if check.Needed && slices.Contains(skip, check.ID) {
				return fmt.Errorf("the check %s cannot be skipped: the others of part %s need it", check.ID, part)
			}
			unknown = slices.DeleteFunc(unknown, func(name string) bool { return name == check.ID })
			names = append(names, check.ID)
		}
	}
	if len(unknown) > 0 {
		return fmt.Errorf("there is no check %q: want some of %s", unknown[0], strings.Join(names, ", "))
	}
	return nil
}
