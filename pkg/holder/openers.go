// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"bytes"
	"cmp"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// opener is a process that has the node of a GPU open. Its start tells it from a later one with the same ID.
type opener struct {
	pid int
	// start is since the machine started, or negative for a process that has ended.
	start time.Duration
}

// sighting is what is remembered of an opener for as long as it has the node open.
type sighting struct {
	first time.Duration
	// before means that it had the node open when a claim was prepared.
	before bool
}

// openers remembers since when who was seen to have the nodes of GPUs open.
type openers struct {
	mu sync.Mutex
	// byGPU has an entry for each GPU that was looked at.
	byGPU map[string]map[opener]sighting
}

// note remembers who has a GPU's node open, and forgets who has not any more. A process that starts to look at a GPU in the
// middle of a claim cannot know who had the node open when that was prepared: it takes those for it that were running then.
// Others would hold up the next claim after each restart.
func (o *openers) note(q Query, present map[opener]string) map[opener]sighting {
	o.mu.Lock()
	defer o.mu.Unlock()
	was, looked := o.byGPU[q.PCIAddress]
	now := make(map[opener]sighting, len(present))
	for p := range present {
		s, seen := was[p]
		if !seen {
			s = sighting{first: q.Now, before: !looked && 0 <= p.start && p.start <= q.Prepared}
		}
		s.before = s.before || s.first <= q.Prepared
		now[p] = s
	}
	if o.byGPU == nil {
		o.byGPU = map[string]map[opener]sighting{}
	}
	o.byGPU[q.PCIAddress] = now
	return now
}

func sorted(all map[opener]string) []opener {
	return slices.SortedFunc(maps.Keys(all), func(a, b opener) int { return cmp.Compare(a.pid, b.pid) })
}

// tick is the kernel's unit of time in procfs, on all machines that Go runs on.
const tick = time.Second / 100

// start is when a process was started, since the machine was, or negative where it has ended. The name of the program, which
// may contain anything, ends with the last bracket.
func (p procfs) start(pid int) time.Duration {
	const field = 22 - 3 // of proc(5), the third being the first after the name
	data, err := os.ReadFile(p.of(pid, "stat"))
	if err != nil {
		return -1
	}
	rest := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(rest) <= field {
		return -1
	}
	ticks, err := strconv.ParseInt(rest[field], 10, 64)
	if err != nil {
		return -1
	}
	return time.Duration(ticks) * tick
}
