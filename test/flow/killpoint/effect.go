// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Effect is one call that the program made or was about to make.
type Effect struct {
	// Call is the system call's name.
	Call string
	// Targets are the paths or the open file that it is about, as far as they
	// could be read.
	Targets []string
}

func (e Effect) String() string { return e.Call + " " + strings.Join(e.Targets, " ") }

// describe says what a call does, and whether it counts at all. The thread waits
// in the call meanwhile.
func describe(n *notification) (Effect, bool) {
	i := slices.IndexFunc(calls, func(c call) bool { return int32(c.number) == n.number })
	if i < 0 {
		return Effect{}, false
	}
	c := calls[i]
	effect := Effect{Call: c.name}
	if c.file >= 0 {
		link := fmt.Sprintf("/proc/%d/fd/%d", n.thread, int32(n.arguments[c.file]))
		if c.regular && !isRegular(link) {
			return Effect{}, false
		}
		// Nothing depends on what it is called.
		target, _ := os.Readlink(link)
		effect.Targets = append(effect.Targets, target)
	}
	for _, argument := range c.paths {
		effect.Targets = append(effect.Targets, text(n.thread, n.arguments[argument]))
	}
	return effect, true
}

func isRegular(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// text reads a string of the program that ends with a zero byte. It is empty
// where the string cannot be read.
func text(thread uint32, address uint64) string {
	const page = 4096
	buffer := make([]byte, page)
	// Up to the end of the page, which is there if its beginning is; a string may
	// go on in the next one, which need not be there.
	var got []byte
	for range 2 {
		part := buffer[:page-address%page]
		local := []unix.Iovec{{Base: &part[0]}}
		local[0].SetLen(len(part))
		n, err := unix.ProcessVMReadv(int(thread), local, []unix.RemoteIovec{{Base: uintptr(address), Len: len(part)}}, 0)
		if err != nil {
			break
		}
		got = append(got, part[:n]...)
		if end := bytes.IndexByte(got, 0); end >= 0 {
			return string(got[:end])
		}
		address += uint64(n)
	}
	return ""
}
