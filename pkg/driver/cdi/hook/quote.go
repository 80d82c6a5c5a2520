// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// maxText is how much of a text that others wrote is repeated in a message, in bytes.
	maxText = 200
	// maxListed is how many of them.
	maxListed = 8
	// maxMessage bounds all of a message. The runtime, the kubelet and the event of the
	// pod repeat it.
	maxMessage = 2000
)

// quote makes a text that others wrote fit for a message.
func quote(text string) string {
	if short := cut(text, maxText); short != text {
		return strconv.Quote(short) + "…"
	}
	return strconv.Quote(text)
}

// list names values, each once: as they are if they could be names of devices or
// sessions, and quoted otherwise.
func list(values []string) string {
	values = slices.Compact(slices.Sorted(slices.Values(values)))
	more := len(values) - maxListed
	if more > 0 {
		values = values[:maxListed]
	}
	var names []string
	for _, value := range values {
		if !isName(value) {
			value = quote(value)
		}
		names = append(names, value)
	}
	text := strings.Join(names, ", ")
	if more > 0 {
		text += " and " + strconv.Itoa(more) + " more"
	}
	return text
}

func isName(text string) bool {
	const others = "0123456789-._"
	return text != "" && len(text) <= maxText && strings.IndexFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && !strings.ContainsRune(others, r)
	}) < 0
}

// OneLine returns the text of an error in one line of bounded length, in which nothing
// controls a terminal.
func OneLine(err error) string {
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	short := cut(text, maxMessage)
	var line strings.Builder
	for _, r := range short {
		if strconv.IsPrint(r) {
			line.WriteRune(r)
			continue
		}
		line.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
	}
	if short != text {
		line.WriteString("…")
	}
	return line.String()
}

// cut returns at most so many bytes of a text, and whole characters.
func cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	for limit > 0 && !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit]
}
