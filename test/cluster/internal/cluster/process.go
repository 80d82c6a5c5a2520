// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/poll"
)

// Process is a process as the machine sees it; ticks and boot tell it from a later one of the same id.
type Process struct {
	PID   int    `json:"pid"`
	Ticks uint64 `json:"ticks"`
	Boot  string `json:"boot"`
}

func identify(pid int) (Process, error) {
	stat, err := readStat(pid)
	if err != nil {
		return Process{}, err
	}
	boot, err := bootID()
	if err != nil {
		return Process{}, err
	}
	return Process{PID: pid, Ticks: stat.ticks, Boot: boot}, nil
}

// Alive says whether the process still runs.
func (p Process) Alive() bool {
	boot, err := bootID()
	if err != nil || boot != p.Boot {
		return false
	}
	stat, err := readStat(p.PID)
	return err == nil && stat.ticks == p.Ticks && stat.state != "Z" && stat.state != "X"
}

// end kills the process and waits until it is gone.
func (p Process) end(ctx context.Context) error {
	if !p.Alive() {
		return nil
	}
	if err := unix.Kill(p.PID, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d: %w", p.PID, err)
	}
	return poll.Until(ctx, downLimit, "a node's processes to end", func(context.Context) error {
		if p.Alive() {
			return fmt.Errorf("process %d is still there", p.PID)
		}
		return nil
	})
}

type procStat struct {
	state string
	ticks uint64 // since boot, when it started
}

func readStat(pid int) (procStat, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return procStat{}, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return parseStat(string(b))
}

// parseStat reads /proc/PID/stat; the name, in brackets, may hold anything.
func parseStat(text string) (procStat, error) {
	const startField = 22 - 3 // counted from the state, which is field 3
	_, after, ok := cutLast(text, ")")
	fields := strings.Fields(after)
	if !ok || len(fields) <= startField {
		return procStat{}, fmt.Errorf("parse process status %q: too few fields", text)
	}
	ticks, err := strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("parse process status %q: %w", text, err)
	}
	return procStat{state: fields[0], ticks: ticks}, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
