// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// width is where lines end, and margin where the text of a section begins.
const (
	width  = 110
	margin = 13
)

// write writes the advice in sections.
func (a *Advice) write(b *bytes.Buffer, f printer.Format) error {
	section := func(title string, paragraphs ...string) {
		for _, p := range paragraphs {
			for _, line := range wrap(p, width-margin) {
				b.WriteString(f.Paint(printer.Bold, title) + strings.Repeat(" ", margin-len(title)) + line + "\n")
				title = ""
			}
		}
	}
	b.WriteString(f.Paint(printer.Good, "Use "+withArticle(a.Mechanism)) + ": " + a.Request.text() + "\n\n")
	section("Why", a.Rule.text())
	i := a.Isolation
	section("Isolation", fmt.Sprintf("memory: %s, compute: %s, faults: %s, jitter: %s", i.Memory, i.Compute, i.Fault, i.Jitter), a.IsolationNote)
	section("Memory", a.MemoryNote)
	section("Cost", a.Cost.text(a.Mechanism, a.Request.Count)...)
	section("Assumed", strings.Join(a.Assumed, " "))
	for _, n := range a.Notes {
		section("Also", n.text())
	}
	section("Mind", a.Warnings...)
	var others []string
	for _, o := range a.Alternatives {
		if !o.Offered {
			o.Why = "not offered: " + o.Why
		}
		others = append(others, fmt.Sprintf("%s: %s", o.Mechanism, o.Why))
	}
	section("Others", others...)
	b.WriteString("\n" + a.Manifest)
	return nil
}

func (r Rule) text() string { return fmt.Sprintf("%s (rule %s). %s", capital(r.When), r.ID, r.Then) }

// text says what a replica asks for.
func (r Request) text() string {
	var parts []string
	if r.Count > 1 {
		parts = append(parts, fmt.Sprintf("%d devices", r.Count))
	}
	parts = append(parts, "class "+r.DeviceClass)
	if len(r.Profiles) > 0 {
		parts = append(parts, "profile "+strings.Join(r.Profiles, " or "))
	}
	if r.MemoryBytes > 0 {
		parts = append(parts, r.memory+" of memory")
	}
	if r.SMPercent > 0 {
		parts = append(parts, fmt.Sprintf("%d %% of the multiprocessors", r.SMPercent))
	}
	return strings.Join(parts, ", ") + ", on " + strings.Join(r.GPUs, " or ")
}

// text says what the replicas cost.
func (c Cost) text(m Mechanism, devices int64) []string {
	var lines []string
	switch {
	case devices > 1:
		lines = append(lines, fmt.Sprintf("%d GPUs for each", devices))
	case c.PerGPU <= 1:
		lines = append(lines, "a GPU for each")
	default:
		lines = append(lines, fmt.Sprintf("1/%d of a GPU for each: a full GPU saves %.0f %% of the GPUs that they would have alone", c.PerGPU,
			RoundHalfUp(100*Saving(1, float64(c.PerGPU)), 0)))
	}
	if c.Unshared > devices {
		gpus := "one GPU"
		if c.GPUs > 1 {
			gpus = fmt.Sprintf("%d GPUs", c.GPUs)
		}
		lines = append(lines, fmt.Sprintf("all together %s instead of %d: %.0f %% less", gpus, c.Unshared, c.SavingPercent))
	}
	switch o := c.OverheadPercent; {
	case o.High == 0:
	case o.Low == o.High:
		lines = append(lines, fmt.Sprintf("%s slow work by about %.0f %%", plural(m), o.High))
	default:
		lines = append(lines, fmt.Sprintf("%s slow work by about %.0f to %.0f %% where several have work", plural(m), o.Low, o.High))
	}
	if c.PerReplica == nil {
		return append(lines, "in money: with --price, what a GPU costs for an hour")
	}
	return append(lines, fmt.Sprintf("$%.2f for a replica and hour on a full GPU, and $%.0f for all GPUs and a month", *c.PerReplica, *c.Month))
}

// withArticle returns "an MPS share" and "a MIG partition".
func withArticle(m Mechanism) string {
	if m == MPS || m == PartitionMPS {
		return "an " + string(m)
	}
	return "a " + string(m)
}

func plural(m Mechanism) string {
	return capital(strings.Replace(string(m), "share", "shares", 1))
}

// capital makes the first letter a capital.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// wrap breaks a text into lines between words.
func wrap(text string, limit int) (lines []string) {
	for word := range strings.FieldsSeq(text) {
		if last := len(lines) - 1; last >= 0 && len([]rune(lines[last]+" "+word)) <= limit {
			lines[last] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}
