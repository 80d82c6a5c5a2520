// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package metrics exports what the driver does and what claims use, for Prometheus.
//
//	definitions.go names, labels and meaning of all metrics
//	metrics.go     those that the driver counts
//	collector.go   those that follow from what is known when they are asked for
//	server.go      the HTTP endpoint
//	reference.go   docs/reference/metrics.md
//
// Nothing here asks a GPU, the API server or a disk, so that no scrape has to wait.
package metrics

import (
	"maps"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

// Options are all optional.
type Options struct {
	// Driver and Node are labels of the metrics that have NVIDIA's names.
	Driver, Node string
	// Version is that of the driver.
	Version string
	// Usage returns what is known of claims, at once.
	Usage func() usage.Snapshot
	// EventErrors returns how many attempts to write an event have failed.
	EventErrors func() uint64
	// Reasons are all values of the label "reason" of failures, which are there with 0
	// before the first failure.
	Reasons []string
	// XIDs are the errors that are there with 0 before the first of them.
	XIDs []uint64
}

// Metrics are those of one process. All methods may be called concurrently.
type Metrics struct {
	o        Options
	registry *prometheus.Registry

	operations map[Operation]operation
	steps      *prometheus.HistogramVec

	reconcileErrors, publishErrors prometheus.Counter
	published                      prometheus.Gauge
	neighbours, extended           *prometheus.GaugeVec

	mu        sync.Mutex
	inventory *device.Inventory
	status    device.Status
	health    map[string]gpu.Health
	xids      map[xidKey]uint64
}

// Operation is what the kubelet asks for.
type Operation string

// Operations that are counted and timed.
const (
	Prepare   Operation = "prepare"
	Unprepare Operation = "unprepare"
)

// operation has the metrics of an operation.
type operation struct {
	duration    *prometheus.HistogramVec // by result
	failures    *prometheus.CounterVec   // by reason
	requests    prometheus.Counter
	draDuration prometheus.Observer
	inflight    prometheus.Gauge
	draFailures *prometheus.CounterVec
}

// Values of the label "result".
const (
	success = "success"
	failure = "failure"
)

var (
	// buckets reach from what a repeated call takes to more than the kubelet waits, 45 s.
	buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 30, 45, 60}
	// stepBuckets are fewer, since there are many steps.
	stepBuckets = []float64{.001, .005, .025, .1, .5, 2.5, 10, 30, 60}
	// draBuckets are those of NVIDIA's driver.
	draBuckets = prometheus.ExponentialBuckets(.05, 2, 9)
)

// New makes metrics that all are zero.
func New(o Options) *Metrics {
	m := &Metrics{
		o: o, registry: prometheus.NewRegistry(), operations: map[Operation]operation{},
		inventory: &device.Inventory{}, health: map[string]gpu.Health{}, xids: map[xidKey]uint64{},
	}
	m.steps = newHistogram(stepDuration, stepBuckets)
	reconcile, publish := newCounter(reconcileErrors), newCounter(publishErrors)
	m.reconcileErrors, m.publishErrors = reconcile.WithLabelValues(), publish.WithLabelValues()
	if o.EventErrors == nil {
		o.EventErrors = func() uint64 { return 0 }
	}
	event := prometheus.NewCounterFunc(prometheus.CounterOpts{Name: eventErrors.Name, Help: eventErrors.Help}, func() float64 { return float64(o.EventErrors()) })
	published, build := newGauge(publishedSlices), newGauge(buildInfo)
	m.published = published.WithLabelValues()
	m.neighbours, m.extended = newGauge(neighbours), newGauge(extendedResources)
	build.WithLabelValues(o.Version, runtime.Version()).Set(1)
	requests, duration, inflight := newCounter(draRequests), newHistogram(draDuration, draBuckets), newGauge(draInflight)
	m.registry.MustRegister(m.steps, reconcile, publish, event, published, build, m.neighbours, m.extended, requests, duration, inflight,
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), m.Collector())
	for _, one := range []struct {
		name                            Operation
		took, failures, draFailureTotal Definition
	}{
		{Prepare, prepareDuration, prepareFailures, draPrepareErrors},
		{Unprepare, unprepareDuration, unprepareFailures, draUnprepareErrors},
	} {
		op := operation{
			duration: newHistogram(one.took, buckets), failures: newCounter(one.failures), draFailures: newCounter(one.draFailureTotal),
			requests:    requests.WithLabelValues(o.Driver, string(one.name)),
			draDuration: duration.WithLabelValues(o.Driver, string(one.name)),
			inflight:    inflight.WithLabelValues(o.Driver, string(one.name)),
		}
		m.registry.MustRegister(op.duration, op.failures, op.draFailures)
		m.operations[one.name] = op
		op.duration.WithLabelValues(success)
		op.duration.WithLabelValues(failure)
		for _, reason := range o.Reasons {
			op.failures.WithLabelValues(reason)
			op.draFailures.WithLabelValues(o.Driver, reason)
		}
		for _, step := range steptime.All() {
			m.steps.WithLabelValues(string(one.name), string(step))
		}
	}
	return m
}

func newCounter(d Definition) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: d.Name, Help: d.Help}, d.Labels)
}

func newGauge(d Definition) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: d.Name, Help: d.Help}, d.Labels)
}

func newHistogram(d Definition, buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: d.Name, Help: d.Help, Buckets: buckets}, d.Labels)
}

// Begin counts an operation on a claim until end is called, with the reason for which it
// failed, or "" if it did not, and with what its steps took.
func (m *Metrics) Begin(name Operation) (end func(reason string, times *steptime.Times)) {
	op, began := m.operations[name], time.Now()
	op.inflight.Inc()
	return func(reason string, times *steptime.Times) {
		took := time.Since(began).Seconds()
		op.inflight.Dec()
		op.requests.Inc()
		op.draDuration.Observe(took)
		result := success
		if reason != "" {
			result = failure
			op.failures.WithLabelValues(reason).Inc()
			op.draFailures.WithLabelValues(m.o.Driver, reason).Inc()
		}
		op.duration.WithLabelValues(result).Observe(took)
		for _, step := range steptime.All() {
			if took, ok := times.Took(step); ok {
				m.steps.WithLabelValues(string(name), string(step)).Observe(took.Seconds())
			}
		}
	}
}

// ReconcileFailed counts a round of cleaning up that left something.
func (m *Metrics) ReconcileFailed() { m.reconcileErrors.Inc() }

// PublishFailed counts an attempt to publish that failed.
func (m *Metrics) PublishFailed() { m.publishErrors.Inc() }

// Published says how many ResourceSlices are in the API server as they should be.
func (m *Metrics) Published(slices int) { m.published.Set(float64(slices)) }

// SetNeighbour says whether something else on the node gives out or partitions its GPUs. Nil means that this is not known.
func (m *Metrics) SetNeighbour(kind string, there *bool) {
	if there == nil {
		m.neighbours.DeleteLabelValues(kind)
		return
	}
	m.neighbours.WithLabelValues(kind).Set(number(*there))
}

// SetExtendedResources says whether pods can have devices by extended resources. Nil means that this is not known.
func (m *Metrics) SetExtendedResources(can *bool) {
	if m.extended.Reset(); can != nil {
		m.extended.WithLabelValues().Set(number(*can))
	}
}

// number is how metrics tell whether something is so.
func number(is bool) float64 { return map[bool]float64{true: 1}[is] }

// SetGPUs says what the GPUs can be, and which conditions they have.
func (m *Metrics) SetGPUs(inventory *device.Inventory, status device.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inventory, m.status = inventory, status
	maps.DeleteFunc(m.health, func(address string, _ gpu.Health) bool { return inventory.GPU(address) == nil })
}

// SetHealth takes what a GPU says about its own state, or the error of asking it: then nothing
// is known.
func (m *Metrics) SetHealth(pciAddress string, health gpu.Health, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		delete(m.health, pciAddress)
		return
	}
	m.health[pciAddress] = health
}

type xidKey struct {
	pciAddress string
	xid        uint64
}

// XID counts an error that the driver reports of a GPU.
func (m *Metrics) XID(pciAddress string, xid uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.xids[xidKey{pciAddress, xid}]++
}
