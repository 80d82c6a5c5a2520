// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"encoding/json"
	"fmt"
	"io"
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
}

// Report is what a run has found out.
type Report struct {
	Header
	Results []Result `json:"results"`
	Summary Summary  `json:"summary"`

	// unanswered is true where the node left a question unanswered.
	unanswered bool
}

// Exit codes of the command.
const (
	ExitHolds       = 0
	ExitDiffers     = 1
	ExitCouldNotRun = 2
)

// ExitCode returns 1 if something differs, 2 if nothing does and nothing could be decided
// or the node left a question unanswered, and 0 otherwise.
func (r *Report) ExitCode() int {
	switch {
	case r.Summary.Differs > 0:
		return ExitDiffers
	case r.unanswered || r.Summary.Holds == 0:
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

// WriteTable writes the report for people: a line for each result, and below it what they
// need to act where it does not hold.
func (r *Report) WriteTable(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "node %s, %s, driver version %s\n\n", r.Node, r.Time, r.Version)
	width := 0
	for _, result := range r.Results {
		width = max(width, len(result.name()))
	}
	for _, result := range r.Results {
		result.write(&b, width)
	}
	fmt.Fprintf(&b, "\n%d hold, %d differ, %d are not testable\n", r.Summary.Holds, r.Summary.Differs, r.Summary.NotTestable)
	if _, err := io.WriteString(out, b.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

func (r Result) name() string {
	if r.Subject == "" {
		return r.Check
	}
	return r.Check + " " + r.Subject
}

func (r Result) write(b *strings.Builder, width int) {
	observed := r.Observed
	if r.Verdict == NotTestable {
		observed = r.Reason
	}
	fmt.Fprintf(b, "%-12s  %-*s  %s\n", r.Verdict, width, r.name(), observed)
	if r.Verdict == Holds {
		return
	}
	detail := func(label, text string) {
		if text != "" {
			fmt.Fprintf(b, "%14s%s: %s\n", "", label, text)
		}
	}
	detail("assumed", r.Assumption)
	detail("expected", r.Expected)
	if r.Verdict == Differs {
		detail("so", r.Reason)
	}
	detail("code", r.Code)
}
