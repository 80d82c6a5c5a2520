// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"regexp"
	"strings"
	"testing"
)

// riddles are phrases that readers had to read twice, and what says the same plainly.
var riddles = []struct {
	phrase  *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?i)the driver obeys`), "the scheduler chooses a device; Partage prepares it"},
	{regexp.MustCompile(`(?i)leaves nothing behind`), "removes everything"},
	{regexp.MustCompile(`(?i)\b(by|in) turns\b`), "time-slicing"},
	{regexp.MustCompile(`(?i)somebody( else)? made`), "created by another tool"},
	{regexp.MustCompile(`(?i)theirs to make`), "Partage does not recreate"},
	{regexp.MustCompile(`(?i)whose they are`), "the owner is unknown"},
	{regexp.MustCompile(`(?i)can be neither`), "cannot be … or …"},
	{regexp.MustCompile(`(?i)gets? one of their own`), "prefer an exclusive device"},
	{regexp.MustCompile(`(?i)keeps count`), "the scheduler accounts for it; nothing enforces it"},
	{regexp.MustCompile(`(?i)what is the case`), "the condition"},
	{regexp.MustCompile(`(?i)all that it can be`), "whole, as partitions, and as shares"},
	{regexp.MustCompile(`(?i)whose faults stay away`), "fault isolation"},
	{regexp.MustCompile(`(?i)what one was killed in the middle of`), "if one is killed mid-operation, the other completes or undoes it"},
	{regexp.MustCompile(`(?i)do not come back (had )?is forgotten`), "records of claims whose pods do not return are discarded"},
	{regexp.MustCompile(`(?i)\bever more\b`), "more and more, or a number"},
	{regexp.MustCompile(`\b[A-Z]+[0-9]+ is [0-9]+ devices`), "is published as"},
	{regexp.MustCompile(`(?:^|\. )Who (asks|cannot|can|has|may|creates|wants|needs) `), "whoever, or users who"},
}

// plain are the pages for readers who want to get something done, or to decide.
var plain = regexp.MustCompile(`^(docs/(concepts|how-to|reference|tutorials)|demo|templates)/|^README.md$`)

func riddlesIn(page string) []string {
	text := codeBlock.ReplaceAllString(page, "")
	// Where a link goes is not read, and neither is what somebody quotes.
	text = link.ReplaceAllString(text, "]")
	var found []string
	for _, r := range riddles {
		for _, phrase := range r.phrase.FindAllString(strings.Join(strings.Fields(text), " "), -1) {
			found = append(found, phrase+": rather "+r.instead)
		}
	}
	return found
}

// TestStyle: guides are plain English, as far as a list of phrases can tell.
func TestStyle(t *testing.T) {
	seen := 0
	for path, page := range rawPages(t) {
		if !plain.MatchString(path) {
			continue
		}
		seen++
		for _, riddle := range riddlesIn(page) {
			t.Errorf("%s: %s", path, riddle)
		}
	}
	if t.Logf("%d cases", seen); seen < 30 {
		t.Errorf("only %d pages", seen)
	}
}

func TestBrokenStyle(t *testing.T) {
	for text, want := range map[string]int{
		"The pods use the GPU by\nturns.":                       1,
		"It has three. Who asks for more waits.":                1,
		"[Static](devices.md#partitions-that-somebody-made) is": 0,
		"```\nby turns\n```\n":                                  0,
		"Who decides? The scheduler.":                           0,
	} {
		if found := riddlesIn(text); len(found) != want {
			t.Errorf("%q: %q", text, found)
		}
	}
}
