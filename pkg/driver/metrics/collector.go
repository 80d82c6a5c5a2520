// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
)

// collector makes the metrics that follow from what is known now.
type collector struct{ *Metrics }

// Collector makes the metrics that follow from what is known, and no others. Dashboards are tested with it.
func (m *Metrics) Collector() prometheus.Collector { return &collector{m} }

// collected are their definitions.
var collected = slices.Concat(claimMetrics, gpuMetrics, []Definition{journalRecords, mpsServers, draPrepared})

// descs are made once.
var descs = func() map[string]*prometheus.Desc {
	all := map[string]*prometheus.Desc{}
	for _, d := range collected {
		all[d.Name] = d.desc()
	}
	return all
}()

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range collected {
		out <- descs[d.Name]
	}
}

// emitter sends metrics. One that is there already is left out, since it would spoil all
// others: two claims of one name may be on the node for a moment.
type emitter struct {
	out  chan<- prometheus.Metric
	seen map[string]bool
}

func (e *emitter) emit(d Definition, value float64, labels ...string) {
	for i := range labels {
		// Names and versions come from the hardware. The registry refuses labels that are not valid UTF-8.
		labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
	}
	key := d.Name + "\x00" + strings.Join(labels, "\x00")
	if e.seen[key] {
		return
	}
	e.seen[key] = true
	kind := prometheus.GaugeValue
	if d.Type == Counter {
		kind = prometheus.CounterValue
	}
	e.out <- prometheus.MustNewConstMetric(descs[d.Name], kind, value, labels...)
}

func (e *emitter) flag(d Definition, value bool, labels ...string) {
	e.emit(d, number(value), labels...)
}

// known emits a value unless it is not known.
func known[T int | int64 | uint | uint64 | float64](e *emitter, d Definition, value *T, labels ...string) {
	if value != nil {
		e.emit(d, float64(*value), labels...)
	}
}

// snapshot is what is known when metrics are asked for.
type snapshot struct {
	usage.Snapshot

	driver, node string
	gpus         []device.Summary
	status       device.Status
	health       map[string]gpu.Health
	xids         map[xidKey]uint64
	serious      []uint64
}

func (m *Metrics) snapshot() *snapshot {
	s := &snapshot{driver: m.o.Driver, node: m.o.Node, serious: m.o.XIDs}
	if m.o.Usage != nil {
		s.Snapshot = m.o.Usage()
	}
	m.mu.Lock()
	inventory := m.inventory
	s.status, s.health, s.xids = m.status, maps.Clone(m.health), maps.Clone(m.xids)
	m.mu.Unlock()
	s.gpus = inventory.Summaries()
	s.withoutSilent()
	return s
}

// withoutSilent leaves out what was read of GPUs that are lost or do not answer: it is old, or a zero that is none. What is known without
// asking them stays, such as who has them, and the peaks of before.
func (s *snapshot) withoutSilent() {
	silent := func(address string) bool {
		return slices.ContainsFunc(s.status.Conditions, func(c device.Condition) bool {
			return c.PCIAddress == address && (c.Reason == device.Lost || c.Reason == device.Unresponsive)
		})
	}
	maps.DeleteFunc(s.health, func(address string, _ gpu.Health) bool { return silent(address) })
	s.GPUs, s.Claims = maps.Clone(s.GPUs), slices.Clone(s.Claims)
	for address, g := range s.GPUs {
		if silent(address) {
			s.GPUs[address] = usage.GPU{Sampled: g.Sampled}
		}
	}
	for i := range s.Claims {
		if c := &s.Claims[i]; silent(c.PCIAddress) {
			c.Measured, c.Idle = usage.Measured{}, nil
		}
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	e := &emitter{out: out, seen: map[string]bool{}}
	s := c.snapshot()
	for i := range s.Claims {
		s.claim(e, &s.Claims[i])
	}
	for i := range s.gpus {
		s.gpu(e, &s.gpus[i])
	}
	s.xidErrors(e)
	for state, records := range s.Records {
		e.emit(journalRecords, float64(records), state)
	}
	if s.Sessions != nil {
		for _, phase := range []mps.Phase{mps.Starting, mps.Running, mps.Faulted, mps.Failed} {
			e.emit(mpsServers, float64(s.Sessions[phase]), string(phase))
		}
	}
	prepared := map[device.Kind]int{}
	for i := range s.Claims {
		prepared[s.Claims[i].Kind]++
	}
	for _, kind := range []device.Kind{device.Whole, device.Partition, device.MPS, device.TimeSlice} {
		e.emit(draPrepared, float64(prepared[kind]), s.node, s.driver, string(kind))
	}
}

func (s *snapshot) claim(e *emitter, c *usage.Claim) {
	profile, instance := "", ""
	if c.Partition != nil {
		profile, instance = c.Partition.Profile, strconv.Itoa(c.Partition.InstanceID)
	}
	labels := []string{c.Claim.Namespace, c.Claim.Name, c.Device, c.UUID, string(c.Kind), profile}
	pod := ""
	if len(c.Pods) == 1 {
		pod = c.Pods[0]
	}
	e.emit(claimInfo, 1, append(slices.Clone(labels), pod, c.PCIAddress, s.uuidOf(c.PCIAddress), instance, string(c.Claim.UID))...)
	for _, pod := range c.Pods {
		e.emit(claimPod, 1, c.Claim.Namespace, c.Claim.Name, pod)
	}
	known(e, claimMemoryUsed, c.MemoryBytes, labels...)
	known(e, claimMemoryPeak, c.PeakBytes, labels...)
	known(e, claimMemoryRequested, c.RequestedBytes, labels...)
	known(e, claimUtilization, c.Utilization, labels...)
	known(e, claimProcesses, c.Processes, labels...)
	if c.MemoryLimitBytes > 0 {
		e.emit(claimMemoryLimit, float64(c.MemoryLimitBytes), labels...)
	}
	if c.Idle != nil {
		e.emit(claimIdle, c.Idle.Seconds(), labels...)
	}
	if health, ok := s.health[c.PCIAddress]; ok {
		e.flag(claimThrottled, len(health.Throttling) > 0, labels...)
	}
}

// uuidOf is that of a GPU.
func (s *snapshot) uuidOf(pciAddress string) string {
	for i := range s.gpus {
		if s.gpus[i].GPU.PCIAddress == pciAddress {
			return s.gpus[i].GPU.UUID
		}
	}
	return ""
}

func (s *snapshot) gpu(e *emitter, g *device.Summary) {
	address := g.GPU.PCIAddress
	e.emit(gpuInfo, 1, address, g.GPU.UUID, g.GPU.ProductName, g.GPU.Architecture, g.DriverVersion)
	e.emit(gpuMemory, float64(g.GPU.Resources.MemoryBytes), address)
	e.emit(gpuMemoryAllocatable, float64(g.AllocatableBytes), address)
	on := occupancyOf(s, g)
	e.emit(gpuMemoryAllocated, float64(on.allocated), address)
	e.emit(gpuRole, 1, address, on.role)
	on.slices(e)
	on.devices(e)
	healthy := true
	for _, c := range s.status.Conditions {
		if c.PCIAddress != address {
			continue
		}
		e.emit(gpuCondition, 1, address, string(c.Reason), string(c.EffectInForce()))
		healthy = healthy && !unhealthy(c)
	}
	e.flag(gpuHealthy, healthy, address)
	if health, ok := s.health[address]; ok {
		for _, reason := range []gpu.Throttling{gpu.ThrottlingHardwareThermal, gpu.ThrottlingSoftwareThermal, gpu.ThrottlingPowerBrake} {
			e.flag(gpuThrottled, slices.Contains(health.Throttling, reason), address, string(reason))
		}
		known(e, gpuTemperature, health.Temperature, address)
	}
	s.gpuUsage(e, address)
}

func (s *snapshot) gpuUsage(e *emitter, address string) {
	used, read := s.GPUs[address]
	if !read || used.Sampled.IsZero() {
		return
	}
	e.emit(gpuSampled, float64(used.Sampled.UnixMilli())/float64(time.Second/time.Millisecond), address)
	if used.Usage == nil {
		return
	}
	e.emit(gpuMemoryUsed, float64(used.Usage.UsedBytes), address)
	e.emit(gpuMemoryUnattributed, float64(used.UnattributedBytes), address)
	known(e, gpuUtilization, used.Usage.Utilization, address)
	known(e, gpuPower, used.Usage.PowerWatts, address)
	for _, of := range []struct {
		traffic        *gpu.Traffic
		sent, received Definition
	}{{used.Usage.NVLink, gpuNVLinkSent, gpuNVLinkReceived}, {used.Usage.PCIe, gpuPCIeSent, gpuPCIeReceived}} {
		if of.traffic != nil {
			e.emit(of.sent, float64(of.traffic.Sent), address)
			e.emit(of.received, float64(of.traffic.Received), address)
		}
	}
}

func (s *snapshot) xidErrors(e *emitter) {
	for key, n := range s.xids {
		e.emit(gpuXIDs, float64(n), key.pciAddress, strconv.FormatUint(key.xid, 10))
	}
	for i := range s.gpus {
		for _, xid := range s.serious {
			e.emit(gpuXIDs, 0, s.gpus[i].GPU.PCIAddress, strconv.FormatUint(xid, 10))
		}
	}
}

// unhealthy reports whether a condition is a fault of all of the GPU.
func unhealthy(c device.Condition) bool {
	return c.Where == nil && c.Kind == "" && c.EffectInForce() != policy.EffectNone && c.Reason.IsFault()
}
