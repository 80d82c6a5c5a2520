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

// adviceView returns the advice for people.
func adviceView(a *Advice) printer.View {
	return &printer.Text{Named: []string{a.Template}, Render: a.write}
}

// write writes the advice in sections.
func (a *Advice) write(b *bytes.Buffer, f printer.Format) error {
	section := func(title string, paragraphs ...string) {
		for i, p := range paragraphs {
			head := ""
			if i == 0 {
				head = title
			}
			for j, line := range wrap(p, width-margin) {
				if j > 0 {
					head = ""
				}
				b.WriteString(f.Paint(printer.Bold, head) + strings.Repeat(" ", margin-len(head)) + line + "\n")
			}
		}
	}
	b.WriteString(f.Paint(printer.Good, "Use "+withArticle(a.Mechanism)) + ": " + a.Request.text() + "\n\n")
	section("Why", fmt.Sprintf("%s (rule %s). %s", capital(a.Rule.When), a.Rule.ID, a.Rule.Then))
	i := a.Isolation
	section("Isolation", fmt.Sprintf("memory: %s, compute: %s, faults: %s, jitter: %s", i.Memory, i.Compute, i.Fault, i.Jitter))
	if a.IsolationNote != "" {
		section("", a.IsolationNote)
	}
	if a.MemoryNote != "" {
		section("Memory", a.MemoryNote)
	}
	section("Cost", a.Cost.text(a.Mechanism, a.Request.Count)...)
	if len(a.Assumed) > 0 {
		section("Assumed", strings.Join(a.Assumed, " "))
	}
	for _, n := range a.Notes {
		section("Also", fmt.Sprintf("%s (rule %s). %s", capital(n.When), n.ID, n.Then))
	}
	section("Mind", a.Warnings...)
	var others []string
	for _, o := range a.Alternatives {
		text := fmt.Sprintf("%s: %s", o.Mechanism, o.Why)
		if !o.Offered {
			text = fmt.Sprintf("%s: not offered: %s", o.Mechanism, o.Why)
		}
		others = append(others, text)
	}
	section("Others", others...)
	b.WriteString("\n" + a.Manifest)
	return nil
}

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
		parts = append(parts, amount(r.MemoryBytes)+" of memory")
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
		lines = append(lines, fmt.Sprintf("all together %s instead of %d: %.0f %% less", gpus(c.GPUs), c.Unshared, c.SavingPercent))
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

func gpus(n int64) string {
	if n == 1 {
		return "one GPU"
	}
	return fmt.Sprintf("%d GPUs", n)
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
func capital(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// wrap breaks a text into lines between words.
func wrap(text string, limit int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case len([]rune(line))+1+len([]rune(word)) > limit:
			lines = append(lines, line)
			line = word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
