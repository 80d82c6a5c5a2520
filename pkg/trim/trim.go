// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package trim gives back memory that a process has needed to start.
package trim

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// startTime is after how long a process has surely done what it does once, such as a look at all
// that it looks at later.
const startTime = 30 * time.Second

// AfterStart trims the process once, when it has started, unless ctx ends before.
func AfterStart(ctx context.Context) {
	timer := time.NewTimer(startTime)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return
	case <-timer.C:
	}
	if err := Now(); err != nil {
		klog.FromContext(ctx).V(4).Info("The memory that only the start needed is not given back", "reason", err)
	}
}

// Now gives back what of the heap is free, and forgets which pages of the program were used. Those
// that are used again are still in the page cache. What only the start needed, which is most of a
// program that links all types of Kubernetes, no longer counts as memory of the process.
func Now() error {
	debug.FreeOSMemory()
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("find the program: %w", err)
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return fmt.Errorf("read what is in memory: %w", err)
	}
	for _, m := range unchanged(smaps, program) {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.start, m.end-m.start, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("drop the pages of %s at %x: %w", program, m.start, errno)
		}
	}
	return nil
}

// mapping is a range of addresses.
type mapping struct{ start, end uintptr }

// unchanged are the mappings of a file that cannot be written and have no page of their own, as
// those have that the dynamic linker writes to: their pages can be read from the file again.
func unchanged(smaps []byte, file string) []mapping {
	var all []mapping
	var last *mapping
	for lines := bufio.NewScanner(bytes.NewReader(smaps)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 {
			continue
		}
		if name, isField := strings.CutSuffix(fields[0], ":"); isField {
			if name == "Anonymous" && last != nil && len(fields) > 1 && fields[1] == "0" {
				all = append(all, *last)
			}
			continue
		}
		last = nil
		const permissions, path = 1, 5
		if len(fields) <= path || strings.Join(fields[path:], " ") != file || strings.Contains(fields[permissions], "w") {
			continue
		}
		if m, ok := parse(fields[0]); ok {
			last = &m
		}
	}
	return all
}

// parse reads a range such as 400000-52a000.
func parse(text string) (mapping, bool) {
	start, end, found := strings.Cut(text, "-")
	first, err := strconv.ParseUint(start, 16, 64)
	if err != nil || !found {
		return mapping{}, false
	}
	last, err := strconv.ParseUint(end, 16, 64)
	return mapping{uintptr(first), uintptr(last)}, err == nil && last > first
}
