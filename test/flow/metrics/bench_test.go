// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// BenchmarkScrape measures scrapes of a plugin on a node with eight GPUs, each cut into seven
// partitions that claims have, and the memory of that plugin in MiB: anonymous, and of files,
// which is the program itself and can be dropped. docs/reference/metrics.md has the figures.
func BenchmarkScrape(b *testing.B) {
	n := harness.NewNode(b, "dgx-h100")
	p := n.Start(b, "--metrics-address=127.0.0.1:0", "--sample-interval=1s", "--poll-interval=10s", "-v=2")
	p.Ready(b)
	s := newScraper(b, p)
	for gpu := range n.Machine(b).GPUs {
		for start := range 7 {
			p.MustPrepare(b, n.Allocate(b, []harness.Device{harness.Partition(gpu, "1g.10gb", start)}))
		}
	}
	for gpu := range n.Machine(b).GPUs {
		s.until(b, "partage_gpu_role", labels{"gpu": n.Address(b, gpu), "role": "partitioned"}, 1)
	}
	var body string
	for b.Loop() {
		var err error
		if body, err = s.body(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	series := 0
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "#") {
			series++
		}
	}
	b.ReportMetric(float64(series), "series")
	b.ReportMetric(float64(len(body)), "body-bytes")
	for _, kind := range []string{"RssAnon", "RssFile"} {
		b.ReportMetric(memory(b, p, kind), kind+"-MiB")
	}
}

// memory reads a line of a process's status.
func memory(b *testing.B, p *harness.Driver, kind string) float64 {
	b.Helper()
	status := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid)))(b)
	found := regexp.MustCompile(kind + `:\s+(\d+) kB`).FindStringSubmatch(string(status))
	if found == nil {
		b.Fatalf("the kernel does not tell %s", kind)
	}
	kib := must.Get(strconv.ParseFloat(found[1], 64))(b)
	return kib / 1024
}
