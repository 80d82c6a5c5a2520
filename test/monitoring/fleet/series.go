// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bufio"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// labels are those of a series.
type labels map[string]string

// with returns the labels and more of them.
func (l labels) with(more labels) labels {
	all := maps.Clone(l)
	maps.Copy(all, more)
	return all
}

func (l labels) String() string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		pairs = append(pairs, fmt.Sprintf("%s=%q", name, l[name]))
	}
	return strings.Join(pairs, ",")
}

// recording collects the samples of all series.
type recording struct {
	out *bufio.Writer
	// before is how long before the end the samples are.
	before time.Duration
}

// add writes a sample.
func (r *recording) add(name string, l labels, value float64) {
	_, _ = r.out.WriteString(name + "{" + l.String() + "} " + strconv.FormatFloat(value, 'g', -1, 64) + " " +
		strconv.FormatInt(End.Add(-r.before).Unix(), 10) + "\n")
}

// Write writes what was recorded in some time before End, in the OpenMetrics format.
func Write(w io.Writer, duration, step time.Duration) error {
	all, err := nodes()
	if err != nil {
		return err
	}
	r := &recording{out: bufio.NewWriter(w)}
	for r.before = duration; r.before >= 0; r.before -= step {
		for _, n := range all {
			if err := r.scrape(n); err != nil {
				return err
			}
			r.driver(n)
		}
		for _, a := range alerts {
			if r.before <= a.since && r.before >= a.until {
				r.add("ALERTS", a.labels.with(labels{"alertname": a.name, "alertstate": "firing", "severity": a.severity}), 1)
			}
		}
	}
	_, _ = r.out.WriteString("# EOF\n")
	return r.out.Flush()
}

// scrape writes the metrics of GPUs and claims.
func (r *recording) scrape(n *node) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(n.collector(r.before))
	families, err := registry.Gather()
	if err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			l := scraped(n.name)
			for _, pair := range m.GetLabel() {
				l[pair.GetName()] = pair.GetValue()
			}
			// One of them is nil, and has the value 0.
			r.add(family.GetName(), l, m.GetGauge().GetValue()+m.GetCounter().GetValue())
		}
	}
	return nil
}

// scraped are the labels that the scrape adds.
func scraped(node string) labels {
	const namespace, daemonSet = "partage", "partage-gpu-kubelet-plugin"
	return labels{
		"node": node, "pod": daemonSet + "-" + node[:3], "namespace": namespace,
		"job": "partage-metrics", "container": "plugin", "instance": node + ":9485",
	}
}

// wave goes up and down around 1, each one differently.
func wave(name string, before time.Duration) float64 {
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(name))
	phase := float64(sum.Sum32()%1000) / 1000 * 2 * math.Pi
	minutes := before.Minutes()
	return 1 + 0.06*math.Sin(minutes/31+phase) + 0.03*math.Sin(minutes/7+2*phase) + 0.01*math.Sin(minutes/2.3+3*phase)
}

// uuid makes a UUID of a name.
func uuid(prefix, of string) string {
	sum := fnv.New128a()
	_, _ = sum.Write([]byte(of))
	s := fmt.Sprintf("%x", sum.Sum(nil))
	return fmt.Sprintf("%s%s-%s-%s-%s-%s", prefix, s[:8], s[8:12], s[12:16], s[16:20], s[20:])
}
