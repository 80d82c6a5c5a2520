// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package quote makes text that others wrote fit for errors, events and logs: it is not
// long, has no control characters, and cannot be taken for what the driver says.
package quote

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// most is how long a text may be once it is quoted, in bytes.
const most = 200

// wasCut ends what was cut, cutLine a whole message.
const (
	wasCut  = "…"
	cutLine = "… (cut)"
)

// plain is what names of objects, devices, pools and requests are made of.
var plain = regexp.MustCompile(`^[0-9A-Za-z]([0-9A-Za-z._:/-]{0,251}[0-9A-Za-z])?$`)

// Name returns the name of an object, and quotes what cannot be one.
func Name[T ~string](name T) string {
	if plain.MatchString(string(name)) {
		return string(name)
	}
	return Text(name)
}

// Names lists names.
func Names(names []string) string {
	var list strings.Builder
	for i, name := range names {
		if i > 0 {
			list.WriteString(", ")
		}
		if list.Len() > 2*most {
			list.WriteString("and " + strconv.Itoa(len(names)-i) + " more")
			break
		}
		list.WriteString(Name(name))
	}
	return list.String()
}

// Plural is a noun with names: "device A", or "devices A, B".
func Plural(noun string, names []string) string {
	if len(names) > 1 {
		noun += "s"
	}
	return noun + " " + Names(names)
}

// CEL makes a text a string of the Common Expression Language.
func CEL[T ~string](text T) string {
	var literal strings.Builder
	literal.WriteByte('\'')
	for _, r := range string(text) {
		switch {
		case r == '\'' || r == '\\':
			literal.WriteString("\\" + string(r))
		case unicode.IsPrint(r):
			literal.WriteRune(r)
		default:
			fmt.Fprintf(&literal, "\\U%08x", r)
		}
	}
	literal.WriteByte('\'')
	return literal.String()
}

// Text quotes a text.
func Text[T ~string](text T) string {
	start, end := fitting(string(text))
	return strconv.Quote(start) + end
}

// Short returns as much of a text as may be quoted by somebody else, as the errors of
// Kubernetes quote values.
func Short[T ~string](text T) T {
	start, end := fitting(string(text))
	return T(start + end)
}

// fitting returns the part of a text that is not too long when it is quoted, and what says that there was more.
func fitting(text string) (start, end string) {
	size := len(`""`) + len(wasCut)
	for at := 0; at < len(text); {
		_, length := utf8.DecodeRuneInString(text[at:])
		if size += len(strconv.Quote(text[at:at+length])) - len(`""`); size > most {
			return text[:at], wasCut
		}
		at += length
	}
	return text, ""
}

// Line makes one line of a message, without control characters and with a limit in bytes.
// It keeps the beginning, and says if there was more.
func Line(message string, limit int) string {
	var line strings.Builder
	for at := 0; at < len(message); {
		_, length := utf8.DecodeRuneInString(message[at:])
		next := message[at : at+length]
		at += length
		switch quoted := strconv.Quote(next); {
		case next == "\n":
			// Joined errors have a line each.
			next = "; "
		case len(quoted) > len(`""`)+length && next != `"` && next != `\`:
			next = quoted[1 : len(quoted)-1]
		}
		line.WriteString(next)
		if line.Len() > limit {
			break
		}
	}
	if line.Len() <= limit {
		return line.String()
	}
	return strings.ToValidUTF8(line.String()[:max(0, limit-len(cutLine))], "") + cutLine // without half a character
}
