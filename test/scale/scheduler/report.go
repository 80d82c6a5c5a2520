// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	perf "k8s.io/kubernetes/test/integration/scheduler_perf"
)

// result is what was measured of a case.
type result struct {
	// podsPerSecond is scheduler_perf's throughput, p99 the time of one attempt to schedule a pod.
	podsPerSecond float64
	p99           time.Duration
	// duration is from the first pod's creation until all are scheduled, to the second.
	duration time.Duration
	usage    usage
	// heapPerNode is the memory that the slices of a node take in a process that has them twice: in the API
	// server's cache and in that of the scheduler.
	heapPerNode float64
}

// readResults reads what scheduler_perf left in a folder, by the names of cases.
func readResults(dir string, cases []scenario, s size, heap map[string]int64) (map[string]*result, error) {
	items, err := readItems(dir)
	if err != nil {
		return nil, err
	}
	results := map[string]*result{}
	for n := range cases {
		c := &cases[n]
		measured, ok := items[c.name()]
		if !ok {
			continue // not among those that were to run
		}
		usage, err := readUsage(filepath.Join(dir, profileFile(c)))
		if err != nil {
			return nil, err
		}
		measured.usage, measured.heapPerNode = usage, float64(heap[c.name()])/float64(s.nodes)
		// scheduler_perf samples once a second, and has no throughput of what is over sooner.
		if measured.podsPerSecond == 0 {
			measured.podsPerSecond = float64(s.podsOf(c)) / measured.duration.Seconds()
		}
		results[c.name()] = measured
	}
	return results, nil
}

// readItems reads scheduler_perf's own results.
func readItems(dir string) (map[string]*result, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, fmt.Errorf("find results: %w", err)
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("%d files with results in %s instead of one", len(files), dir)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	var items perf.DataItems
	if err := json.Unmarshal(data, &items); err != nil {
		return nil, fmt.Errorf("read results from %s: %w", files[0], err)
	}
	results := map[string]*result{}
	for _, item := range items.DataItems {
		// Benchmark/case/workload/namespace
		path := strings.Split(item.Labels["Name"], "/")
		if len(path) < 2 {
			return nil, fmt.Errorf("a result of %q: no case has this name", item.Labels["Name"])
		}
		r, ok := results[path[1]]
		if !ok {
			r = &result{}
			results[path[1]] = r
		}
		switch {
		case item.Labels["Metric"] == "SchedulingThroughput":
			r.podsPerSecond = item.Data["Average"]
		case item.Labels["Metric"] == "SchedulingDuration":
			r.duration = inUnit(item.Data["Duration"], item.Unit)
		case item.Labels["Metric"] == "scheduler_scheduling_attempt_duration_seconds" && item.Labels["result"] == "scheduled":
			r.p99 = inUnit(item.Data["Perc99"], item.Unit)
		}
	}
	return results, nil
}

func inUnit(value float64, unit string) time.Duration {
	if unit == "ms" {
		return time.Duration(value * float64(time.Millisecond))
	}
	return time.Duration(value * float64(time.Second))
}

// report writes a table, and below it each fleet's figures as parts of those of NVIDIA's driver for
// the same load.
func report(out io.Writer, cases []scenario, s size, results map[string]*result) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "load\tfleet\tpods\tpods/s\tp99\tCPU/pod\tscheduler/pod\t/node\tgathering\tCEL\theap/node\t\n")
	for n := range cases {
		c := &cases[n]
		r, ok := results[c.name()]
		if !ok {
			continue
		}
		pods := s.podsOf(c)
		perPod := r.usage.scheduler / time.Duration(pods)
		fmt.Fprintf(table, "%s\t%s\t%d\t%.1f\t%s\t%s\t%s\t%s\t%s\t%s\t%.0f KB\t\n", c.load.name, c.fleet, pods, r.podsPerSecond,
			short(r.p99), short(r.usage.process/time.Duration(pods)), short(perPod), short(perPod/time.Duration(s.nodes)),
			percent(r.usage.gathering, r.usage.scheduler), percent(r.usage.cel, r.usage.scheduler), r.heapPerNode/1024)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	table = tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "\nparts of reference\tfleet\tpods/s\tp99\tscheduler\theap\t\n")
	for n := range cases {
		c := &cases[n]
		r, theirs := results[c.name()], results[c.load.name+"_reference"]
		if r == nil || theirs == nil || r == theirs {
			continue
		}
		fmt.Fprintf(table, "%s\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t\n", c.load.name, c.fleet, r.podsPerSecond/theirs.podsPerSecond,
			ratio(r.p99, theirs.p99), ratio(r.usage.scheduler, theirs.usage.scheduler), r.heapPerNode/theirs.heapPerNode)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}

func ratio(part, whole time.Duration) float64 { return float64(part) / float64(max(whole, 1)) }

func percent(part, whole time.Duration) string { return fmt.Sprintf("%.0f %%", 100*ratio(part, whole)) }

// short is a duration with three digits.
func short(d time.Duration) string {
	switch {
	case d >= time.Second:
		return d.Round(10 * time.Millisecond).String()
	case d >= time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(time.Microsecond).String()
}
