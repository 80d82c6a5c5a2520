// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package document

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSplit(t *testing.T) {
	for in, want := range map[string][]Document{
		"":                         nil,
		"---\n---\n":               nil,
		"a: 1\n":                   {{[]byte("a: 1\n"), 1}},
		"---\na: 1\n---\nb: 2":     {{[]byte("a: 1\n"), 2}, {[]byte("b: 2"), 4}},
		"a: |\n  ---\n  b\n":       {{[]byte("a: |\n  ---\n  b\n"), 1}},
		"a: 1\r\n---\r\nb: 2\r\n":  {{[]byte("a: 1\r\n"), 1}, {[]byte("b: 2\r\n"), 3}},
		"# c\n---\t\na: 1\n":       {{[]byte("# c\n"), 1}, {[]byte("a: 1\n"), 3}},
		"a: 1\n----\n":             {{[]byte("a: 1\n----\n"), 1}},
		"a: 1\n--- # here\nb: 2\n": {{[]byte("a: 1\n"), 1}, {[]byte(" # here\nb: 2\n"), 2}},
		"--- {a: 1}\n":             {{[]byte(" {a: 1}\n"), 1}},
	} {
		got, err := Split([]byte(in))
		if err != nil {
			t.Errorf("%q: %v", in, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", in, diff)
		}
	}
	if _, err := Split([]byte(strings.Repeat("---\na\n", maxDocuments+1))); err == nil || !strings.Contains(err.Error(), "more than 10000 documents") {
		t.Errorf("too many documents: %v", err)
	}
}

func TestReadFile(t *testing.T) {
	if _, err := ReadFile(bytes.NewReader(make([]byte, MaxBytes+1)), "-"); err == nil || !strings.Contains(err.Error(), "is longer than") {
		t.Errorf("too much: %v", err)
	}
	if got, err := ReadFile(strings.NewReader("a"), "-"); err != nil || string(got) != "a" {
		t.Errorf("%q, %v", got, err)
	}
}

// FuzzSplit: no text is lost beside separators, and no document panics.
func FuzzSplit(f *testing.F) {
	f.Add([]byte("a: 1\n---\n# b\n--- {c: 1}\n...\n---\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<14 {
			t.Skip("too long")
		}
		documents, err := Split(data)
		if err != nil {
			return
		}
		rest := data
		for _, d := range documents {
			_, after, found := bytes.Cut(rest, d.Text)
			if !found {
				t.Fatalf("%q is not in what comes after the others", d.Text)
			}
			rest = after
			if _, err := d.Parse(); err != nil && len(err.Error()) > 1000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
		}
	})
}
