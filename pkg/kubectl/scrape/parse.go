// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"fmt"
	"io"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// ID is a device of a claim.
type ID struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node"`
	Device    string `json:"device"`
}

// Claim is what the driver tells of a device of a claim. What is nil is not known.
type Claim struct {
	ID `json:",inline"`

	Kind    string `json:"type,omitempty"`
	Profile string `json:"profile,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	// GPU is the PCI address.
	GPU            string   `json:"-"`
	UsedBytes      *int64   `json:"usedBytes,omitempty"`
	PeakBytes      *int64   `json:"peakBytes,omitempty"`
	LimitBytes     *int64   `json:"limitBytes,omitempty"`
	RequestedBytes *int64   `json:"requestedBytes,omitempty"`
	Utilization    *float64 `json:"smUtilization,omitempty"`
	Processes      *int64   `json:"processes,omitempty"`
	Throttled      *bool    `json:"throttled,omitempty"`
	// Idle is for how long no sample had the claim at work.
	Idle *time.Duration `json:"-"`
	// Since is when the driver began to look: what was before is not known. It is zero if the
	// driver does not tell.
	Since time.Time `json:"-"`
}

// GPU is what the driver tells of a GPU. What is nil is not known.
type GPU struct {
	Node           string   `json:"node"`
	PCIBusID       string   `json:"pciBusID"`
	UUID           string   `json:"uuid,omitempty"`
	ProductName    string   `json:"productName,omitempty"`
	Role           string   `json:"role,omitempty"`
	Healthy        *bool    `json:"healthy,omitempty"`
	MemoryBytes    *int64   `json:"memoryBytes,omitempty"`
	AllocatedBytes *int64   `json:"allocatedBytes,omitempty"`
	UsedBytes      *int64   `json:"usedBytes,omitempty"`
	Utilization    *float64 `json:"utilization,omitempty"`
	Temperature    *float64 `json:"temperatureCelsius,omitempty"`
}

// parse reads the text format of Prometheus.
func parse(body io.Reader, node string) (*Result, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(body)
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	if families["partage_build_info"] == nil {
		return nil, fmt.Errorf("read the answer: it has no partage_build_info, so that it is not the driver's")
	}
	r := &reader{families: families}
	var started time.Time
	if at := r.series("process_start_time_seconds"); len(at) > 0 {
		started = time.Unix(int64(at[0].value), 0)
	}
	return &Result{Claims: r.claims(node, started), GPUs: r.gpus(node)}, nil
}

type reader struct{ families map[string]*dto.MetricFamily }

type series struct {
	labels map[string]string
	value  float64
}

func (r *reader) series(name string) []series {
	var all []series
	for _, m := range r.families[name].GetMetric() {
		one := series{labels: map[string]string{}}
		for _, l := range m.GetLabel() {
			one.labels[l.GetName()] = l.GetValue()
		}
		switch {
		case m.GetGauge() != nil:
			one.value = m.GetGauge().GetValue()
		case m.GetCounter() != nil:
			one.value = m.GetCounter().GetValue()
		default:
			one.value = m.GetUntyped().GetValue()
		}
		all = append(all, one)
	}
	return all
}

// collect makes one T of each series of the metric info, and has the other metrics with the same labels set what they say.
func collect[K comparable, T any](r *reader, prefix string, key func(series) K, of func(series) T, others map[string]func(*T, series)) []T {
	all, at := []T{}, map[K]int{}
	for _, s := range r.series(prefix + "info") {
		if _, has := at[key(s)]; !has {
			at[key(s)], all = len(all), append(all, of(s))
		}
	}
	for name, set := range others {
		for _, s := range r.series(prefix + name) {
			if i, has := at[key(s)]; has {
				set(&all[i], s)
			}
		}
	}
	return all
}

func (s series) whole() *int64 { return new(int64(s.value)) }

func (r *reader) claims(node string, started time.Time) []Claim {
	id := func(s series) ID {
		return ID{Namespace: s.labels["namespace"], Name: s.labels["resourceclaim_name"], Node: node, Device: s.labels["device"]}
	}
	return collect(r, "partage_claim_", id, func(s series) Claim {
		return Claim{ID: id(s), Kind: s.labels["kind"], Profile: s.labels["profile"], UUID: s.labels["uuid"], GPU: s.labels["gpu"], Since: started}
	}, map[string]func(*Claim, series){
		"memory_used_bytes":      func(c *Claim, s series) { c.UsedBytes = s.whole() },
		"memory_peak_bytes":      func(c *Claim, s series) { c.PeakBytes = s.whole() },
		"memory_limit_bytes":     func(c *Claim, s series) { c.LimitBytes = s.whole() },
		"memory_requested_bytes": func(c *Claim, s series) { c.RequestedBytes = s.whole() },
		"sm_utilization_ratio":   func(c *Claim, s series) { c.Utilization = &s.value },
		"processes":              func(c *Claim, s series) { c.Processes = s.whole() },
		"throttled":              func(c *Claim, s series) { c.Throttled = new(s.value > 0) },
		"idle_seconds":           func(c *Claim, s series) { c.Idle = new(time.Duration(s.value * float64(time.Second))) },
	})
}

func (r *reader) gpus(node string) []GPU {
	return collect(r, "partage_gpu_", func(s series) string { return s.labels["gpu"] }, func(s series) GPU {
		return GPU{Node: node, PCIBusID: s.labels["gpu"], UUID: s.labels["uuid"], ProductName: s.labels["product"]}
	}, map[string]func(*GPU, series){
		"healthy":                func(g *GPU, s series) { g.Healthy = new(s.value > 0) },
		"memory_bytes":           func(g *GPU, s series) { g.MemoryBytes = s.whole() },
		"memory_allocated_bytes": func(g *GPU, s series) { g.AllocatedBytes = s.whole() },
		"memory_used_bytes":      func(g *GPU, s series) { g.UsedBytes = s.whole() },
		"utilization_ratio":      func(g *GPU, s series) { g.Utilization = &s.value },
		"temperature_celsius":    func(g *GPU, s series) { g.Temperature = &s.value },
		"role": func(g *GPU, s series) {
			if s.value > 0 {
				g.Role = s.labels["role"]
			}
		},
	})
}
