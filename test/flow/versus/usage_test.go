// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package versus

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// cpuTime is what a process has used, and the children that it has waited for.
func cpuTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	// The clock of a process, as clock_getcpuclockid makes it.
	const sched = 2
	var now unix.Timespec
	must.Do(t, unix.ClockGettime(int32(^pid)<<3|sched, &now), "CPU time of process", pid)
	return time.Duration(now.Nano()) + childrenTime(t, pid)
}

// fieldsOf are those of /proc/PID/stat from the third on, the state.
func fieldsOf(stat []byte) []string {
	// The name of the program, which comes before, may have spaces.
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
}

// waitsForDisk reports whether a thread of a process does.
func waitsForDisk(t testing.TB, pid int) bool {
	t.Helper()
	threads := must.Get(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)))(t)
	return slices.ContainsFunc(threads, func(path string) bool {
		// A thread that has ended since waits for nothing.
		stat, err := os.ReadFile(path)
		return err == nil && fieldsOf(stat)[0] == "D"
	})
}

// childrenTime is exact to 10 ms.
func childrenTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	data := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)))(t)
	fields := fieldsOf(data)
	const cutime, cstime, tick = 16 - 3, 17 - 3, 10 * time.Millisecond
	var ticks int64
	for _, i := range []int{cutime, cstime} {
		n, err := strconv.ParseInt(fields[i], 10, 64)
		must.Do(t, err, "/proc/", pid, "/stat")
		ticks += n
	}
	return time.Duration(ticks) * tick
}

// memory is what a process has in memory, in bytes.
type memory struct {
	resident float64
	// private is what no file has: the kernel cannot drop it.
	private float64
}

func memoryOf(t testing.TB, pid int) memory {
	t.Helper()
	data := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid)))(t)
	var m memory
	wanted := map[string]*float64{"Rss:": &m.resident, "Private_Dirty:": &m.private}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 || wanted[fields[0]] == nil {
			continue
		}
		kib, err := strconv.ParseFloat(fields[1], 64)
		must.Do(t, err, "/proc/", pid, "/smaps_rollup")
		*wanted[fields[0]] = kib * 1024
	}
	if m.resident == 0 || m.private == 0 {
		t.Fatalf("/proc/%d/smaps_rollup: %s", pid, data)
	}
	return m
}
