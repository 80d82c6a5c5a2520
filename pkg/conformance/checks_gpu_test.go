// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import "testing"

// TestListOf: a process may choose its name, and the report goes to a terminal.
func TestListOf(t *testing.T) {
	for _, test := range []struct {
		processes []nodeProcess
		want      string
	}{
		{nil, "none"},
		{[]nodeProcess{{PID: 7, Name: "nv-hostengine"}, {PID: 8, Name: "train"}}, "nv-hostengine (7), train (8)"},
		{[]nodeProcess{{PID: 9, Name: "\x1b[2J\nholds"}}, `"\x1b[2J\nholds" (9)`},
		{[]nodeProcess{{PID: 9, Name: "a (1), b"}}, `"a (1), b" (9)`},
	} {
		if got := listOf(test.processes); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
}
