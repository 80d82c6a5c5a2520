// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package quote

import (
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"gpu-0000-1b-00-0": "gpu-0000-1b-00-0", "r/a": "r/a", "node-1.example.com": "node-1.example.com",
		"2f2b0c1e-0000-4000-8000-000000000000": "2f2b0c1e-0000-4000-8000-000000000000",
		strings.Repeat("a", 253):               strings.Repeat("a", 253),
		"":                                     `""`,
		"a b":                                  `"a b"`,
		"a\nE1122 forged":                      `"a\nE1122 forged"`,
		"\x1b[31m":                             `"\x1b[31m"`,
		"a\u202eb":                             `"a\u202eb"`,
		"x: it is fine":                        `"x: it is fine"`,
		"müller":                               `"müller"`,
		"\xff":                                 `"\xff"`,
		strings.Repeat("a", 254):               `"` + strings.Repeat("a", 195) + `"…`,
		strings.Repeat("ü", 9000):              `"` + strings.Repeat("ü", 97) + `"…`,
		strings.Repeat("\x00", 9000):           `"` + strings.Repeat(`\x00`, 48) + `"…`,
	} {
		if got := Name(name); got != want {
			t.Errorf("%.40q: got  %s\nwant %s", name, got, want)
		}
	}
}

func TestShort(t *testing.T) {
	t.Parallel()
	cases := 0
	for _, unit := range []string{"a", "ü", "\n", "\x1b[31m", "\U0001f600", "\u202e", "\xff", `"`, `\`, "\U000e0001"} {
		for _, times := range []int{0, 1, 19, 20, 50, 97, 98, 99, 195, 196, 197, 198, 200, 9000} {
			text := strings.Repeat(unit, times)
			short := Short(text)
			// As %q does it.
			if quoted := strconv.Quote(short); len(quoted) > most || !strings.HasPrefix(text, strings.TrimSuffix(short, wasCut)) {
				t.Errorf("%d of %q: %d bytes: %s", times, unit, len(quoted), quoted)
			}
			if cut := short != text; cut != strings.HasSuffix(short, wasCut) {
				t.Errorf("%d of %q: not clear whether it was cut: %q", times, unit, short)
			}
			if quoted := Text(text); len(quoted) > most {
				t.Errorf("%d of %q: %d bytes: %s", times, unit, len(quoted), quoted)
			}
			cases++
		}
	}
	if cases != 140 {
		t.Errorf("%d cases", cases)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	if got := Names([]string{"a", "b\n", "c/d"}); got != `a, "b\n", c/d` {
		t.Error(got)
	}
	many := Names(strings.Split(strings.Repeat("abcdefg,", 1000), ","))
	if len(many) > 700 || !strings.HasSuffix(many, " more") {
		t.Errorf("%d bytes, %q", len(many), many)
	}
}

func TestLine(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		"":                   "",
		"it is fine":         "it is fine",
		`quoted "x\ny" stay`: `quoted "x\ny" stay`,
		"one\ntwo":           "one; two",
		"\x1b[31mred\r\t":    `\x1b[31mred\r\t`,
		"\xffü\u202e":        `\xffü\u202e`,
	} {
		if got := Line(message, 100); got != want {
			t.Errorf("%q: got %q, want %q", message, got, want)
		}
	}
	cases := 0
	for _, unit := range []string{"a", "ü", "\n", "\x00", "\U0001f600", "\xff", `"`} {
		for _, limit := range []int{0, 20, 21, 22, 23, 1024} {
			got := Line("begin "+strings.Repeat(unit, 9000), limit)
			bad := strings.ContainsFunc(got, unicode.IsControl) || !utf8.ValidString(got)
			if bad || len(got) > max(limit, len(cutLine)) || limit >= 20 && (!strings.HasPrefix(got, "begin ") || !strings.HasSuffix(got, cutLine)) {
				t.Errorf("%q with %d bytes: %d bytes, %q", unit, limit, len(got), got)
			}
			cases++
		}
	}
	if cases != 42 {
		t.Errorf("%d cases", cases)
	}
}

// TestCEL: a text is one string, whatever is in it.
func TestCEL(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"1g.10gb": `'1g.10gb'`, "": `''`, `x' || true || 'y`: `'x\' || true || \'y'`, `\`: `'\\'`, "two\nlines": `'two\U0000000alines'`,
	} {
		if got := CEL(text); got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}
