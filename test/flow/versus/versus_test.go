// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package versus

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

const machineName = "dgx-h100"

var (
	peer   = flag.String("peer", "", "NVIDIA's `program`; without it ours is measured alone")
	settle = flag.Duration("settle", 45*time.Second, "how `long` drivers may do what is left after a start and after claims, before they are idle")
	idle   = flag.Duration("idle", time.Minute, "how `long` nothing is asked of the drivers")
)

// BenchmarkSideBySide measures both drivers, one claim of one and one of the other in turns,
// and prints a table. An operation is a claim of each, prepared and unprepared.
func BenchmarkSideBySide(b *testing.B) {
	sides := []*side{startOurs(b)}
	if *peer != "" {
		sides = append(sides, startTheirs(b, *peer))
	}
	result := &table{}
	for _, s := range sides {
		result.sides = append(result.sides, s.name)
	}
	published(b, result, sides)
	time.Sleep(*settle)
	resting(b, result, sides, "idle, nothing prepared: ", true)

	// A partition that stays, so that MIG mode does.
	for _, s := range sides {
		s.driver.MustPrepare(b, s.claim(b, harness.Partition(0, "1g.10gb", 1), ""))
	}
	for _, load := range []struct {
		name, text         string
		device             harness.Device
		config             harness.Config
		prepare, unprepare goal
	}{
		{"partition", "one partition", harness.Partition(0, "1g.10gb", 0), "", goal{ratio: 0.7}, goal{ratio: 0.8}},
		{"whole", "a whole GPU", harness.Device{GPU: 1}, "", goal{ratio: 0.7}, goal{ratio: 0.7}},
		{"slice", "a time slice", harness.Device{GPU: 2}, harness.GPUWithShortSlice, goal{ratio: 0.5}, goal{ratio: 0.5}},
	} {
		b.Run(load.name, func(b *testing.B) {
			var all []*took
			for range sides {
				all = append(all, &took{})
			}
			// The first claims pay for what is made once.
			for range 10 {
				cycle(b, sides, load.device, load.config, all)
			}
			before := cpuTimes(b, sides)
			for _, t := range all {
				*t = took{}
			}
			claims := 0.0
			for b.Loop() {
				slices.Reverse(sides)
				slices.Reverse(all)
				cycle(b, sides, load.device, load.config, all)
				claims++
			}
			prepare, unprepare, used := map[string]float64{}, map[string]float64{}, map[string]float64{}
			for name, now := range cpuTimes(b, sides) {
				used[name] = milliseconds(now-before[name]) / claims
			}
			for i, s := range sides {
				prepare[s.name], unprepare[s.name] = median(all[i].prepare), median(all[i].unprepare)
			}
			result.add("prepare "+load.text+", p50", "ms", load.prepare, prepare)
			result.add("unprepare "+load.text+", p50", "ms", load.unprepare, unprepare)
			result.add("CPU time of both, "+load.text, "ms", goal{}, used)
		})
	}
	// What is left to do for claims that are gone.
	time.Sleep(*settle)
	resting(b, result, sides, "idle after these claims: ", false)
	fmt.Printf("\n%s\n", result)
}

// took is how long the calls for each claim took.
type took struct{ prepare, unprepare []time.Duration }

// cycle prepares and unprepares a claim with each driver, while the others rest.
func cycle(b *testing.B, sides []*side, d harness.Device, config harness.Config, all []*took) {
	b.Helper()
	for i, s := range sides {
		c := s.claim(b, d, config)
		calm(b, sides)
		all[i].prepare = append(all[i].prepare, timed(func() { s.driver.MustPrepare(b, c) }))
		calm(b, sides)
		all[i].unprepare = append(all[i].unprepare, timed(func() { s.driver.MustUnprepare(b, c) }))
	}
}

// calm waits until no driver does what it does after a call, such as writing the status of the
// claim, and syncing to disk what it has to remember of that, for which others that write wait,
// too. It gives up on one that always has something to do.
func calm(t testing.TB, sides []*side) {
	t.Helper()
	const attempts, pause = 100, 2 * time.Millisecond
	before := cpuTimes(t, sides)
	for range attempts {
		time.Sleep(pause)
		now := cpuTimes(t, sides)
		waits := slices.ContainsFunc(sides, func(s *side) bool { return waitsForDisk(t, s.driver.Cmd.Process.Pid) })
		if maps.Equal(before, now) && !waits {
			return
		}
		before = now
	}
}

func timed(call func()) time.Duration {
	start := time.Now()
	call()
	return time.Since(start)
}

func cpuTimes(t testing.TB, sides []*side) map[string]time.Duration {
	t.Helper()
	all := map[string]time.Duration{}
	for _, s := range sides {
		all[s.name] = cpuTime(t, s.driver.Cmd.Process.Pid)
	}
	return all
}

func median(all []time.Duration) float64 {
	all = slices.Sorted(slices.Values(all))
	return milliseconds(all[len(all)/2])
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

const mebi = 1 << 20

// resting measures drivers that have nothing to do.
func resting(b *testing.B, result *table, sides []*side, when string, goals bool) {
	b.Helper()
	type process struct {
		side, what    string
		pid           int
		cpu, rss, own goal
	}
	var all []process
	for _, s := range sides {
		all = append(all, process{s.name, "plugin", s.driver.Cmd.Process.Pid, goal{most: 0.5}, goal{most: 80}, goal{most: 12}})
		if s.supervisor != nil {
			// Go's collector leaves a heap below 4 MiB alone, and every process gets there: what is below that depends on when it is measured.
			all = append(all, process{s.name, "MPS supervisor", s.supervisor.Cmd.Process.Pid, goal{}, goal{most: 24}, goal{most: 8}})
		}
	}
	before := make([]time.Duration, len(all))
	for i, p := range all {
		before[i] = cpuTime(b, p.pid)
	}
	start := time.Now()
	// There is nothing to wait for: what is measured is that nothing happens.
	time.Sleep(*idle)
	long := time.Since(start)
	for _, what := range []string{"plugin", "MPS supervisor"} {
		cpu, rss, own := map[string]float64{}, map[string]float64{}, map[string]float64{}
		var g process
		for i, p := range all {
			if p.what != what {
				continue
			}
			if g.what == "" && goals {
				g = p
			}
			m := memoryOf(b, p.pid)
			cpu[p.side] = 100 * float64(cpuTime(b, p.pid)-before[i]) / float64(long)
			rss[p.side], own[p.side] = m.resident/mebi, m.private/mebi
		}
		result.add(when+"CPU, "+what, "% of a core", g.cpu, cpu)
		result.add(when+"memory (RSS), "+what, "MiB", g.rss, rss)
		result.add(when+"memory of its own, "+what, "MiB", g.own, own)
	}
}

// published measures the slices.
func published(b *testing.B, result *table, sides []*side) {
	b.Helper()
	size, devices, attributes := map[string]float64{}, map[string]float64{}, map[string]float64{}
	for _, s := range sides {
		for _, slice := range s.node.API.Slices() {
			text := must.Get(json.Marshal(slice))(b)
			size[s.name] += float64(len(text)) / 1000
			devices[s.name] += float64(len(slice.Spec.Devices))
			for _, d := range slice.Spec.Devices {
				attributes[s.name] += float64(len(d.Attributes))
			}
		}
	}
	result.add("ResourceSlices, JSON", "kB", goal{ratio: 1}, size)
	result.add("devices", "", goal{}, devices)
	result.add("attributes", "", goal{}, attributes)
}
