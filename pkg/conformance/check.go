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
// same report as the node.
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

	// needs returns why nothing can be found out of this GPU, or nothing.
	needs func(*gpu.GPU) string
	// find judges. It returns no finding where the node has nothing that the check is about.
	find func(context.Context, *Node) []Finding
}

// run returns the findings, complete.
func (c *Check) run(ctx context.Context, n *Node) []Finding {
	if slices.Contains(n.header.Skip, c.ID) {
		return []Finding{{Verdict: Skipped, Reason: "it was not to run"}}
	}
	findings := unlessEmpty(n.missing)
	if c.needs != nil && n.missing.Verdict == "" && c.needs(n.gpu) != "" {
		findings = []Finding{cannot("%s", c.needs(n.gpu)).withSubject(n.header.GPU)}
	}
	if len(findings) == 0 {
		findings = c.find(ctx, n)
	}
	for i := range findings {
		f := &findings[i]
		f.Expected = cmp.Or(f.Expected, c.Expected)
		// What an error means for the user is not known.
		if f.Verdict == Differs && !f.failed {
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

// because says what follows from a difference, also from an error.
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

// unlessEmpty returns a finding, unless it is the zero value.
func unlessEmpty(f Finding) []Finding {
	if f.Verdict == "" {
		return nil
	}
	return []Finding{f}
}

// findingOf is a finding, or that of an error.
func findingOf(f Finding, err error) Finding {
	if err != nil {
		return failed(err)
	}
	return f
}

// oneFinding makes one finding. The zero value stands for none.
func oneFinding(judge func(context.Context, *Node) (Finding, error)) func(context.Context, *Node) []Finding {
	return func(ctx context.Context, n *Node) []Finding { return unlessEmpty(findingOf(judge(ctx, n))) }
}

// judgeFact judges one fact.
func judgeFact[T any](f fact[T], judge func(T) Finding) func(context.Context, *Node) []Finding {
	return oneFinding(func(ctx context.Context, n *Node) (Finding, error) {
		value, err := f.answer(ctx, n)
		if err != nil {
			return Finding{}, err
		}
		return judge(value), nil
	})
}

// eachGPU judges each GPU that can be read. A node whose GPUs cannot be read is one finding;
// driver.nvml says why.
func eachGPU(judge func(context.Context, *Node, *gpu.GPU) (Finding, error)) func(context.Context, *Node) []Finding {
	return func(ctx context.Context, n *Node) []Finding {
		node, err := gpus.answer(ctx, n)
		if err != nil {
			f := cannot("the GPUs cannot be read: %v", err)
			f.unanswered = errors.Is(err, ErrNoAnswer)
			return []Finding{f}
		}
		var findings []Finding
		for i := range node.GPUs {
			g := &node.GPUs[i]
			findings = append(findings, unlessEmpty(findingOf(judge(ctx, n, g)).withSubject(g.PCIAddress))...)
		}
		return findings
	}
}

// judgeEachGPU judges one fact of each GPU that it is about.
func judgeEachGPU[T any](concerns func(*gpu.GPU) bool, f gpuFact[T], judge func(*gpu.GPU, T) Finding) func(context.Context, *Node) []Finding {
	return eachGPU(func(ctx context.Context, n *Node, g *gpu.GPU) (Finding, error) {
		if !concerns(g) {
			return Finding{}, nil
		}
		value, err := f(g).answer(ctx, n)
		if err != nil {
			return Finding{}, err
		}
		return judge(g, value), nil
	})
}

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
// checks is one more name here.
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
	unknown, names := slices.Clone(skip), []string{}
	for _, part := range []Part{ReadOnly, MPS, Intrusive} {
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
