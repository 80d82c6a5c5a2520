// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package finding

import (
	"strings"
	"testing"
)

// TestOnce: what is said of several fields is said once.
func TestOnce(t *testing.T) {
	var l List
	l.Add(Lost, "a", "1", "nobody knows it")
	l.Add(Changed, "b", "", "it is other")
	l.Add(Lost, "c", "2", "nobody knows it")
	const want = "# title\n# * not translated: nobody knows it:\n#     a = 1\n#     c = 2\n# * works differently: b: it is other\n\n"
	if got := l.Comment("title"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestComment: whatever a value is, it stays in its line of the comment, and a long one is cut.
func TestComment(t *testing.T) {
	var l List
	l.Add(Lost, "a.b", "x\ny: 1", "because")
	l.Add(Lost, "a.b", "x\ny: 1", "because")
	l.Add(Unread, "c", "", "nobody reads it")
	l.Add(Changed, "d", strings.Repeat("z", 5000), "it is long")
	want := "# title\n# * not translated: a.b = x; y: 1: because\n# * ignored before, too: c: nobody reads it\n# * works differently: d = "
	got := l.Comment("title")
	if !strings.HasPrefix(got, want) || !strings.HasSuffix(got, ": it is long\n\n") || len(got) > 1000 {
		t.Errorf("got\n%s", got)
	}
	if ignored := l.Ignored(); ignored != 2 || len(l) != 3 {
		t.Errorf("%d of %d are ignored, want 2 of 3", ignored, len(l))
	}
}
