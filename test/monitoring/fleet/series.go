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
)

// absent is the value of a series at a time at which it has none.
var absent = math.NaN()

// recording collects the samples of all series.
type recording struct {
	out        *bufio.Writer
	start, end time.Time
	step       time.Duration
}

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

// add writes the samples of a series, whose value is a function of the time before the end.
func (r *recording) add(name string, l labels, value func(before time.Duration) float64) {
	series := name + "{" + l.String() + "} "
	for at := r.start; !at.After(r.end); at = at.Add(r.step) {
		if v := value(r.end.Sub(at)); !math.IsNaN(v) {
			_, _ = r.out.WriteString(series + strconv.FormatFloat(v, 'g', -1, 64) + " " + strconv.FormatInt(at.Unix(), 10) + "\n")
		}
	}
}

// always is a value that does not change.
func always(value float64) func(time.Duration) float64 {
	return func(time.Duration) float64 { return value }
}

// wave goes up and down around 1, each one differently.
func wave(name string) func(before time.Duration) float64 {
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(name))
	phase := float64(sum.Sum32()%1000) / 1000 * 2 * math.Pi
	return func(before time.Duration) float64 {
		minutes := before.Minutes()
		return 1 + 0.06*math.Sin(minutes/31+phase) + 0.03*math.Sin(minutes/7+2*phase) + 0.01*math.Sin(minutes/2.3+3*phase)
	}
}

// Write writes what was recorded in some time before End, in the OpenMetrics format.
func Write(w io.Writer, duration, step time.Duration) error {
	r := &recording{out: bufio.NewWriter(w), start: End.Add(-duration), end: End, step: step}
	all := gpus()
	asked := claims(all)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		r.gpu(all[key], asked)
	}
	for _, c := range asked {
		r.claim(c)
	}
	for _, node := range []string{"dgx-1", "hgx-2", "edge-3"} {
		r.driver(node, asked)
	}
	_, _ = r.out.WriteString("# EOF\n")
	return r.out.Flush()
}

// scraped are the labels that the scrape adds.
func scraped(node string) labels {
	return labels{"node": node, "pod": daemonSet + "-" + node[:3], "namespace": namespace, "job": "partage-metrics", "container": "plugin", "instance": node + ":9485"}
}

// has reports whether the claim is there at a time.
func (c claim) has(before time.Duration) bool { return before <= c.since && before >= c.until }

// while makes a value that is absent while the claim is.
func (c claim) while(value func(time.Duration) float64) func(time.Duration) float64 {
	return func(before time.Duration) float64 {
		if !c.has(before) {
			return absent
		}
		return value(before)
	}
}

// device names the device as the driver does.
func (c claim) device() string {
	name := "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(c.gpu.address)
	switch c.kind {
	case "gpu":
		return name
	case "mig":
		return fmt.Sprintf("%s-mig-%s-%d", name, strings.ReplaceAll(c.profile, ".", ""), c.first)
	default:
		return name + "-" + c.kind
	}
}

// uuid makes a UUID of a name.
func uuid(prefix, of string) string {
	sum := fnv.New128a()
	_, _ = sum.Write([]byte(of))
	s := fmt.Sprintf("%x", sum.Sum(nil))
	return fmt.Sprintf("%s%s-%s-%s-%s-%s", prefix, s[:8], s[8:12], s[12:16], s[16:20], s[20:])
}
