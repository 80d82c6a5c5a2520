// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Result is a finding with the check that made it.
type Result struct {
	Check      string `json:"check"`
	Assumption string `json:"assumption"`
	Code       string `json:"code"`
	Finding
}

// Summary counts results by verdict.
type Summary struct {
	Holds       int `json:"holds"`
	Differs     int `json:"differs"`
	NotTestable int `json:"notTestable"`
	Skipped     int `json:"skipped,omitempty"`
}

// Report is what a run has found out.
type Report struct {
	Header
	Results []Result `json:"results"`
	Summary Summary  `json:"summary"`

	// unanswered is true where the node left a question unanswered.
	unanswered bool
	// untested is true where nothing could be decided of one of the parts.
	untested bool
}

// run runs checks and adds what they find.
func (r *Report) run(ctx context.Context, n *Node, checks []Check) {
	for i := range checks {
		for _, f := range checks[i].run(ctx, n) {
			r.add(&checks[i], f)
		}
	}
}

// add appends a finding and counts it.
func (r *Report) add(c *Check, f Finding) {
	r.Results = append(r.Results, Result{Check: c.ID, Assumption: c.Assumption, Code: c.Code, Finding: f})
	s := &r.Summary
	counts := map[Verdict]*int{Holds: &s.Holds, Differs: &s.Differs, NotTestable: &s.NotTestable, Skipped: &s.Skipped}
	*counts[f.Verdict]++
	r.unanswered = r.unanswered || f.unanswered
}

// Exit codes of the command.
const (
	ExitHolds       = 0
	ExitDiffers     = 1
	ExitCouldNotRun = 2
)

// ExitCode returns 1 if something differs, 2 if nothing does and nothing could be decided
// of a part, or the node left a question unanswered, and 0 otherwise.
func (r *Report) ExitCode() int {
	switch {
	case r.Summary.Differs > 0:
		return ExitDiffers
	case r.unanswered || r.untested || r.Summary.Holds == 0:
		return ExitCouldNotRun
	}
	return ExitHolds
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(out io.Writer) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(r); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// WriteTable writes the report for people: a line for each check, or for each of its
// findings that are not the same on all GPUs, and below it what they need to act where it
// does not hold.
func (r *Report) WriteTable(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "node %s, %s, gpu-kubelet-plugin %s\n\n", r.Node, r.Time, r.Version)
	width := 0
	for _, result := range r.Results {
		width = max(width, len(result.Check))
	}
	for _, same := range r.groups() {
		same.write(&b, width)
	}
	fmt.Fprintf(&b, "\n%d hold, %d differ, %d not testable", r.Summary.Holds, r.Summary.Differs, r.Summary.NotTestable)
	if r.Summary.Skipped > 0 {
		fmt.Fprintf(&b, ", %d skipped", r.Summary.Skipped)
	}
	if _, err := fmt.Fprintln(out, b.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// group is a finding about one subject or several.
type group struct {
	Result

	subjects []string
}

// groups are the results, where those of a check that say the same are one.
func (r *Report) groups() (groups []*group) {
	for _, result := range r.Results {
		subject := result.Subject
		result.Subject = ""
		i := slices.IndexFunc(groups, func(g *group) bool { return g.Result == result })
		if i < 0 {
			i = len(groups)
			groups = append(groups, &group{Result: result})
		}
		if subject != "" {
			groups[i].subjects = append(groups[i].subjects, subject)
		}
	}
	return groups
}

// write writes the line of a group, and below it what people need to act.
func (g *group) write(b *strings.Builder, width int) {
	const few = 2 // fit into a line
	text := g.Observed
	if g.Verdict == NotTestable || g.Verdict == Skipped {
		text = g.Reason
	}
	all, which := strings.Join(g.subjects, ", "), ""
	switch {
	case len(g.subjects) > few:
		text, which = fmt.Sprintf("%d x %s", len(g.subjects), text), all
	case all != "":
		text = all + ": " + text
	}
	fmt.Fprintf(b, "%-12s  %-*s  %s\n", g.Verdict, width, g.Check, text)
	if g.Verdict == Holds || g.Verdict == Skipped {
		return
	}
	so := ""
	if g.Verdict == Differs {
		so = g.Reason
	}
	for _, detail := range [][2]string{{"which", which}, {"assumed", g.Assumption}, {"expected", g.Expected}, {"so", so}, {"code", g.Code}} {
		if detail[1] != "" {
			fmt.Fprintf(b, "%14s%-9s %s\n", "", detail[0]+":", detail[1])
		}
	}
}
