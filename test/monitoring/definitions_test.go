// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/test/monitoring/fleet"
)

// scrapeLabels are those that a scrape adds, and a histogram.
var scrapeLabels = []string{"node", "pod", "namespace", "job", "container", "instance", "le"}

// TestDefinitions: the fleet that dashboards are tested with, and the samples of the tests
// of alerts, have the names and labels that the driver's metrics have.
func TestDefinitions(t *testing.T) {
	known := map[string][]string{}
	for _, g := range metrics.Reference() {
		for _, d := range g.Definitions {
			names := []string{d.Name}
			if d.Type == metrics.Histogram {
				names = []string{d.Name + "_bucket", d.Name + "_count", d.Name + "_sum"}
			}
			for _, name := range names {
				known[name] = slices.Concat(d.Labels, scrapeLabels)
			}
		}
	}
	var made bytes.Buffer
	if err := fleet.Write(&made, 0, time.Minute); err != nil {
		t.Fatal(err)
	}
	made.WriteString(read(t, "testdata/healthy.yaml"))
	for _, file := range glob(t, "testdata/alerts/*.yaml") {
		made.WriteString(read(t, file))
	}
	series := regexp.MustCompile(`\b(partage_\w+)\{([^}]*)\}`)
	label := regexp.MustCompile(`(\w+)="`)
	cases := 0
	for _, found := range series.FindAllStringSubmatch(made.String(), -1) {
		cases++
		labels, ok := known[found[1]]
		if !ok {
			t.Errorf("the driver has no metric %s", found[1])
			continue
		}
		for _, one := range label.FindAllStringSubmatch(found[2], -1) {
			if !slices.Contains(labels, one[1]) {
				t.Errorf("%s has no label %s, only %s", found[1], one[1], strings.Join(labels, ", "))
			}
		}
	}
	if t.Logf("%d cases", cases); cases < 100 {
		t.Errorf("only %d series", cases)
	}
}
