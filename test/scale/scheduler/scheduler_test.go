// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/dynamic-resource-allocation/structured"
	perf "k8s.io/kubernetes/test/integration/scheduler_perf"
)

var (
	nodes  = flag.Int("nodes", 100, "nodes of the cluster")
	pods   = flag.Int("pods", 200, "pods that are created; some loads have fewer")
	dir    = flag.String("slices", "", "folder with the slices that test/scale/slices wrote")
	all    = flag.Bool("all", false, "run also what tells little more than other cases")
	output = flag.String("output", "", "folder for profiles, results and the table; none are kept if it is empty")
)

// chart is what helm makes of the chart, with a class for each MIG profile.
const chart = "../../../deployments/helm/testdata/mig-resources-all.golden.yaml"

func TestMain(m *testing.M) {
	if err := perf.InitTests(); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// newPreparer returns what prepares the clusters, and the option by which scheduler_perf calls it.
func newPreparer(tb testing.TB) (*preparer, perf.SchedulerPerfOption) {
	tb.Helper()
	if *dir == "" {
		tb.Skip("needs -slices: make bench-scale-scheduler")
	}
	classes, err := loadClasses(chart)
	if err != nil {
		tb.Fatal(err)
	}
	p := &preparer{dir: *dir, cases: chosen(), classes: classes, heap: map[string]int64{}, began: time.Now()}
	return p, perf.WithNodeUpdateFn(p.prepare)
}

// chosen are the cases that are to run.
func chosen() []scenario {
	return slices.DeleteFunc(slices.Clone(cases), func(c scenario) bool { return !*all && slices.Contains(extra, c.name()) })
}

// BenchmarkPerfScheduling runs all cases and prints a table.
func BenchmarkPerfScheduling(b *testing.B) {
	p, option := newPreparer(b)
	structured.EnableAllocators("incubating")
	defer structured.EnableAllocators()
	folder := *output
	if folder == "" {
		folder = b.TempDir()
	}
	if err := flag.Set("data-items-dir", folder); err != nil {
		b.Fatal(err)
	}
	perf.PerfSchedulingLabelFilter = label
	s := size{nodes: *nodes, pods: *pods}
	config, err := writeConfig(b.TempDir(), p.cases, s)
	if err != nil {
		b.Fatal(err)
	}
	perf.RunBenchmarkPerfScheduling(b, config, "partage", nil, option)
	results, err := readResults(folder, p.cases, s, p.heap)
	if err != nil {
		b.Fatal(err)
	}
	table, err := os.Create(filepath.Join(folder, "table.txt"))
	if err != nil {
		b.Fatal(err)
	}
	if err := report(table, p.cases, s, results); err != nil {
		b.Fatal(err)
	}
	if err := table.Close(); err != nil {
		b.Fatal(err)
	}
}

// TestCases runs a case of each sort with a few nodes and pods, so that none is broken when
// somebody wants to measure.
func TestCases(t *testing.T) {
	p, option := newPreparer(t)
	p.cases = nil
	for _, c := range cases {
		if slices.Contains([]string{"one-1g_toy", "half-full_h100", "slow_reference"}, c.name()) {
			p.cases = append(p.cases, c)
		}
	}
	perf.TestSchedulingLabelFilter = label
	config, err := writeConfig(t.TempDir(), p.cases, size{nodes: 3, pods: 8})
	if err != nil {
		t.Fatal(err)
	}
	if err := flag.Set("data-items-dir", t.TempDir()); err != nil {
		t.Fatal(err)
	}
	perf.RunIntegrationPerfScheduling(t, config, option)
	if len(p.heap) != 3 {
		t.Errorf("%d cases ran, want 3", len(p.heap))
	}
}
