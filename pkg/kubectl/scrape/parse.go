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

	Kind        string   `json:"type,omitempty"`
	Profile     string   `json:"profile,omitempty"`
	UUID        string   `json:"uuid,omitempty"`
	UsedBytes   *int64   `json:"usedBytes,omitempty"`
	PeakBytes   *int64   `json:"peakBytes,omitempty"`
	LimitBytes  *int64   `json:"limitBytes,omitempty"`
	Utilization *float64 `json:"smUtilization,omitempty"`
	Processes   *int64   `json:"processes,omitempty"`
	Throttled   *bool    `json:"throttled,omitempty"`
	// Idle is for how long no sample had the claim at work.
	Idle *time.Duration `json:"-"`
	// Since is when the driver began to look: what was before is not known. It is zero if the
	// driver does not tell.
	Since time.Time `json:"-"`
}

// beginning is how long after its start the driver may first see what there is.
const beginning = time.Minute

// IdleForLonger reports whether a claim that has its devices since a time may have been idle for longer than the driver knows: it was not
// seen at work since the driver was started.
func (c *Claim) IdleForLonger(allocated, now time.Time) bool {
	return c.Idle != nil && *c.Idle > 0 && allocated.Before(c.Since) && *c.Idle+beginning >= now.Sub(c.Since)
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
		started = time.Unix(int64(at[0].Value), 0)
	}
	told := &Result{Claims: r.claims(node, started)}
	for _, g := range r.gpus(node) {
		told.GPUs = append(told.GPUs, *g)
	}
	return told, nil
}

type reader struct{ families map[string]*dto.MetricFamily }

func (r *reader) series(name string) model.Vector {
	if r.families[name] == nil {
		return nil
	}
	// What is no gauge, counter or untyped is none of ours.
	samples, _ := expfmt.ExtractSamples(&expfmt.DecodeOptions{}, r.families[name])
	return samples
}

func label(s *model.Sample, name model.LabelName) string { return string(s.Metric[name]) }

// collect makes one T of each series of the metric info, and has the other metrics with the same labels set what they say.
func collect[K comparable, T any](r *reader, prefix string, key func(*model.Sample) K, of func(*model.Sample) *T,
	others map[string]func(*T, *model.Sample),
) map[K]*T {
	all := map[K]*T{}
	for _, s := range r.series(prefix + "info") {
		all[key(s)] = of(s)
	}
	for name, set := range others {
		for _, s := range r.series(prefix + name) {
			if one := all[key(s)]; one != nil {
				set(one, s)
			}
		}
	}
	return all
}

func whole(s *model.Sample) *int64 { return new(int64(s.Value)) }

func (r *reader) claims(node string, started time.Time) map[ID]*Claim {
	id := func(s *model.Sample) ID {
		return ID{Namespace: label(s, "namespace"), Name: label(s, "resourceclaim_name"), Node: node, Device: label(s, "device")}
	}
	return collect(r, "partage_claim_", id, func(s *model.Sample) *Claim {
		return &Claim{ID: id(s), Kind: label(s, "kind"), Profile: label(s, "profile"), UUID: label(s, "uuid"), Since: started}
	}, map[string]func(*Claim, *model.Sample){
		"memory_used_bytes":    func(c *Claim, s *model.Sample) { c.UsedBytes = whole(s) },
		"memory_peak_bytes":    func(c *Claim, s *model.Sample) { c.PeakBytes = whole(s) },
		"memory_limit_bytes":   func(c *Claim, s *model.Sample) { c.LimitBytes = whole(s) },
		"sm_utilization_ratio": func(c *Claim, s *model.Sample) { c.Utilization = new(float64(s.Value)) },
		"processes":            func(c *Claim, s *model.Sample) { c.Processes = whole(s) },
		"throttled":            func(c *Claim, s *model.Sample) { c.Throttled = new(s.Value > 0) },
		"idle_seconds":         func(c *Claim, s *model.Sample) { c.Idle = new(time.Duration(float64(s.Value) * float64(time.Second))) },
	})
}

func (r *reader) gpus(node string) map[string]*GPU {
	return collect(r, "partage_gpu_", func(s *model.Sample) string { return label(s, "gpu") }, func(s *model.Sample) *GPU {
		return &GPU{Node: node, PCIBusID: label(s, "gpu"), UUID: label(s, "uuid"), ProductName: label(s, "product")}
	}, map[string]func(*GPU, *model.Sample){
		"healthy":                func(g *GPU, s *model.Sample) { g.Healthy = new(s.Value > 0) },
		"memory_bytes":           func(g *GPU, s *model.Sample) { g.MemoryBytes = whole(s) },
		"memory_allocated_bytes": func(g *GPU, s *model.Sample) { g.AllocatedBytes = whole(s) },
		"memory_used_bytes":      func(g *GPU, s *model.Sample) { g.UsedBytes = whole(s) },
		"utilization_ratio":      func(g *GPU, s *model.Sample) { g.Utilization = new(float64(s.Value)) },
		"temperature_celsius":    func(g *GPU, s *model.Sample) { g.Temperature = new(float64(s.Value)) },
		"role": func(g *GPU, s *model.Sample) {
			if s.Value > 0 {
				g.Role = label(s, "role")
			}
		},
	})
}
