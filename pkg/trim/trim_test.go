// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const smaps = `00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/program
Size:                328 kB
Rss:                 300 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me dw
00651000-00652000 r--p 00051000 08:02 173521 /usr/bin/program
Anonymous:             4 kB
00652000-00655000 rw-p 00052000 08:02 173521 /usr/bin/program
Anonymous:             0 kB
00655000-00656000 r--p 00052000 08:02 173521 /usr/bin/program
Anonymous:             0 kB
00e03000-00e24000 rw-p 00000000 00:00 0 [heap]
Anonymous:             0 kB
35b1800000-35b1820000 r-xp 00000000 08:02 135522 /usr/lib/libc.so.6
Anonymous:             0 kB
35b1820000-35b1821000 r-xp 00000000 08:02 135522 /usr/bin/program (deleted)
Anonymous:             0 kB
7fff0000-7fff1000 r-xp 00000000 00:00 0
Anonymous:             0 kB
`

// TestUnchanged: what somebody has written to cannot be read from the file again.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	want := []mapping{{0x400000, 0x452000}, {0x655000, 0x656000}}
	if got := unchanged([]byte(smaps), "/usr/bin/program"); !reflect.DeepEqual(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
	if got := unchanged([]byte("x\nnothing of this - is one\n\nAnonymous: 0 kB\n"), "one"); got != nil {
		t.Errorf("got %x of other text", got)
	}
}

// TestNow: the test's own program has fewer pages in memory, and goes on.
func TestNow(t *testing.T) {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	mappings := unchanged(text, program)
	if len(mappings) == 0 {
		t.Fatalf("the program has no mapping in\n%s", text)
	}
	for _, m := range mappings { // all of it, whatever was used
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.start, m.end-m.start, unix.MADV_POPULATE_READ); errno != 0 {
			t.Skipf("populate: %v", errno)
		}
	}
	before := filePages(t)
	if err := Now(); err != nil {
		t.Fatal(err)
	}
	if after := filePages(t); after > before*3/4 {
		t.Errorf("%d kB of files are in memory, before it were %d", after, before)
	}
}

// filePages is how much of files the process has in memory, in kB.
func filePages(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "\nRssFile:")
	size := 0
	if _, err := fmt.Sscan(rest, &size); err != nil {
		t.Fatalf("%v in\n%s", err, status)
	}
	return size
}
