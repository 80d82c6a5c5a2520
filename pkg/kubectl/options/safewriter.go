// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package options

import (
	"bytes"
	"crypto/rand"
	"io"
	"os"
	"unicode"
	"unicode/utf8"
)

// mark begins a style. It is a different one each time the program runs, so that nobody can have written it into an object.
var mark = "\x1b[" + rand.Text() + ";"

// Styled returns a text in a colour or weight, which is the number of an SGR sequence, such that a safe writer leaves it.
// It has to be written at once.
func Styled(number, text string) string { return mark + number + "m" + text + mark + "0m" }

// safeWriter writes what others may have written, such as messages of events and conditions, so that no terminal obeys it and it is read in
// the order in which it is written: of what controls one only new lines, tabs and what is Styled are left.
type safeWriter struct {
	to io.Writer
	// rest begins a character that the next write ends.
	rest []byte
}

// Safe makes a writer safe for terminals.
func Safe(w io.Writer) io.Writer {
	if _, isSafe := w.(*safeWriter); isSafe || w == nil {
		return w
	}
	return &safeWriter{to: w}
}

// file is where a writer writes in the end, or nil if that is no file.
func file(w io.Writer) *os.File {
	if safe, is := w.(*safeWriter); is {
		w = safe.to
	}
	f, _ := w.(*os.File)
	return f
}

// Write implements io.Writer.
func (s *safeWriter) Write(data []byte) (int, error) {
	text := append(s.rest, data...)
	s.rest = nil
	var safe bytes.Buffer
	for len(text) > 0 {
		if !utf8.FullRune(text) {
			s.rest = bytes.Clone(text)
			break
		}
		r, size := utf8.DecodeRune(text)
		switch {
		case bytes.HasPrefix(text, []byte(mark)):
			size = len(mark)
			safe.WriteString("\x1b[")
		case r == '\x1b':
			safe.WriteString("^[")
		case r == utf8.RuneError && size == 1, Controls(r) && r != '\n' && r != '\t' && !bytes.HasPrefix(text, []byte("\r\n")):
			safe.WriteRune(unicode.ReplacementChar)
		default:
			safe.Write(text[:size])
		}
		text = text[size:]
	}
	_, err := s.to.Write(safe.Bytes())
	return len(data), err
}

// Controls reports whether a terminal may obey a character, or show others in another order because of it.
func Controls(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) }

// ClearScreen empties the terminal, and goes to its first line.
func (o *Options) ClearScreen() error {
	_, err := io.WriteString(file(o.Out), "\x1b[H\x1b[2J")
	return err
}
