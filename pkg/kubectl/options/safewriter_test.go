// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package options

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// TestSafe: no terminal obeys what somebody has written into an object, wherever a command prints it.
func TestSafe(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"two lines\nand a\ttab, é, 模, \ufffd":                   "two lines\nand a\ttab, é, 模, \ufffd",
		Styled("31", "red") + " and " + Styled("1", "a\u202eb"): "\x1b[31mred\x1b[0m and \x1b[1ma\ufffdb\x1b[0m",
		"\x1b[31mred of others\x1b[0m":                          "^[[31mred of others^[[0m",
		"\u202egnp.exe, \u2066a\u2069, \u200f\u061c":            "\ufffdgnp.exe, \ufffda\ufffd, \ufffd\ufffd",
		"cleared\x1b[2J\x1b[H":                                  "cleared^[[2J^[[H",
		"a title \x1b]0;pwned\a":                                "a title ^[]0;pwned\ufffd",
		"hidden\x1b[8m, \x1b[31;8mtoo":                          "hidden^[[8m, ^[[31;8mtoo",
		"over\rwritten\b\x7f":                                   "over\ufffdwritten\ufffd\ufffd",
		"eight bits \u009b2J, raw \x9b2J":                       "eight bits \ufffd2J, raw \ufffd2J",
		"from Windows\r\n":                                      "from Windows\r\n",
	} {
		var bytewise bytes.Buffer
		for w, i := Safe(&bytewise), 0; i < len(text); i++ {
			if _, err := fmt.Fprint(w, text[i:i+1]); err != nil {
				t.Fatal(err)
			}
		}
		if bytewise.String() != want && !strings.HasPrefix(text, "from Windows") && !strings.Contains(text, mark) {
			t.Errorf("%q in single bytes: got %q", text, bytewise.String())
		}
		var whole bytes.Buffer
		if _, err := fmt.Fprint(Safe(Safe(&whole)), text); err != nil || whole.String() != want {
			t.Errorf("%q: got %q, want %q, %v", text, whole.String(), want, err)
		}
	}
}
