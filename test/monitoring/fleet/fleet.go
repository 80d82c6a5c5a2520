// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet makes up what Prometheus would have recorded of three nodes with GPUs over
// some hours, with what happens in such a time. Claims come and go, some use what they have and
// some do not, one GPU is lost.
//
//	fleet.go  the nodes, their claims, what goes wrong, and the alerts of it
//	node.go   what a node's driver knows of GPUs and claims. The driver's own code makes metrics of it
//	driver.go what a node's driver counts of its own work
//	series.go the samples, in the OpenMetrics format
package fleet

import "time"

// End is when the recording ends. It is a fixed time, so that pictures of it stay the same, and not a full hour, whose
// label at the edge of a graph would be cut off.
var End = time.Date(2026, time.March, 5, 13, 50, 0, 0, time.UTC)

// machines are the nodes with models of GPUs and their PCI buses. The MIG mode of an A100 stays as it is:
// mig has those with MIG mode on.
var machines = []struct {
	node, board string
	buses, mig  []string
}{
	{"dgx-1", "h100-80-sxm", []string{"1b", "43", "52", "61", "9d", "c3", "d1", "df"}, nil},
	{"hgx-2", "a100-40", []string{"0b", "48", "88", "c8"}, []string{"0b", "c8"}},
	{"edge-3", "l4", []string{"17", "31", "b1", "ca"}, nil},
}

// What goes wrong, and for how long before the end: a GPU of hgx-2 has fallen off the bus, one of dgx-1 is too hot, a program
// there has had an error, and a claim does nothing.
const (
	lostGPU, lostXID, lostFor          = "0000:88:00.0", 79, 100 * time.Minute
	hotGPU, hotFor                     = "0000:df:00.0", 70 * time.Minute
	programGPU, programXID, programFor = hotGPU, 31, 22 * time.Minute
	idleFor                            = 5 * time.Hour
)

// alerts are those that fire because of it, from one time before the end to another.
var alerts = []struct {
	name, severity string
	labels         labels
	since, until   time.Duration
}{
	{"PartageGPULost", "critical", labels{"node": "hgx-2", "gpu": lostGPU}, lostFor, 0},
	{"PartageGPUXIDErrors", "warning", labels{"node": "hgx-2", "gpu": lostGPU, "xid": "79"}, lostFor, lostFor - 15*time.Minute},
	{"PartageGPUUnhealthy", "warning", labels{"node": "hgx-2", "gpu": lostGPU, "reason": "xid"}, lostFor - 15*time.Minute, 0},
	{"PartageGPUThrottled", "warning", labels{"node": "dgx-1", "gpu": hotGPU}, hotFor - 30*time.Minute, 0},
	{"PartageClaimIdle", "info", labels{"node": "dgx-1", "namespace": "sandbox", "resourceclaim_name": "lab-mia"}, idleFor - 4*time.Hour, 0},
}

const (
	h   = time.Hour
	gib = 1 << 30
)

// claim is a claim with one device.
type claim struct {
	// device is what comes after the GPU's name: "", "mig-3g40gb-0", "mps".
	node, bus, device string
	namespace, name   string
	// memory and sm are the parts of the device's memory and multiprocessors that are used.
	memory, sm float64
	// requested is in GiB, for shares.
	requested float64
	// since and until are times before the end; 0 is before the beginning, and never.
	since, until time.Duration
	// idle is for how long before the end nothing has run.
	idle time.Duration
}

// claims are those of the recording.
var claims = []claim{
	{node: "dgx-1", bus: "1b", namespace: "research", name: "llm-train-0", memory: 0.93, sm: 0.9, since: 4*h + 20*time.Minute},
	{node: "dgx-1", bus: "43", namespace: "research", name: "llm-train-1", memory: 0.91, sm: 0.87, since: 4*h + 20*time.Minute},
	{node: "dgx-1", bus: "9d", namespace: "sandbox", name: "lab-mia", memory: 0.02, idle: idleFor},
	{node: "dgx-1", bus: "df", namespace: "research", name: "diffusion", memory: 0.78, sm: 0.7},

	{node: "dgx-1", bus: "52", device: "mig-3g40gb-0", namespace: "serving", name: "chat-a", memory: 0.82, sm: 0.55},
	{node: "dgx-1", bus: "52", device: "mig-2g20gb-4", namespace: "serving", name: "embed-b", memory: 0.45, sm: 0.3},
	{node: "dgx-1", bus: "52", device: "mig-1g10gb-6", namespace: "batch", name: "score-17", memory: 0.6, sm: 0.8, since: 35 * time.Minute},
	{node: "dgx-1", bus: "61", device: "mig-2g20gb-0", namespace: "serving", name: "rerank", memory: 0.35, sm: 0.2},
	{node: "dgx-1", bus: "61", device: "mig-1g10gb-2", namespace: "sandbox", name: "lab-ben", memory: 0.15, sm: 0.03},
	{node: "dgx-1", bus: "61", device: "mig-1g10gb-3", namespace: "sandbox", name: "lab-eva", memory: 0.55, sm: 0.12},
	{node: "dgx-1", bus: "61", device: "mig-3g40gb-4", namespace: "batch", name: "score-11", memory: 0.7, sm: 0.9,
		since: 5 * h, until: 4*h + 25*time.Minute},
	{node: "dgx-1", bus: "61", device: "mig-3g40gb-4", namespace: "batch", name: "score-12", memory: 0.7, sm: 0.9,
		since: 4 * h, until: 3*h + 20*time.Minute},
	{node: "dgx-1", bus: "61", device: "mig-3g40gb-4", namespace: "batch", name: "score-13", memory: 0.7, sm: 0.9,
		since: 3 * h, until: 2*h + 20*time.Minute},
	{node: "hgx-2", bus: "0b", device: "mig-3g20gb-0", namespace: "serving", name: "vision-a", memory: 0.7},
	{node: "hgx-2", bus: "0b", device: "mig-3g20gb-4", namespace: "serving", name: "vision-b", memory: 0.65},
	{node: "hgx-2", bus: "88", namespace: "research", name: "ablation-4", memory: 0.8, sm: 0.9, until: 95 * time.Minute},
	{node: "hgx-2", bus: "c8", device: "mig-1g5gb-6", namespace: "sandbox", name: "lab-lea", memory: 0.3},

	{node: "dgx-1", bus: "c3", device: "mps", namespace: "serving", name: "api-0", requested: 19, memory: 0.4, sm: 0.2},
	{node: "dgx-1", bus: "c3", device: "mps", namespace: "serving", name: "api-1", requested: 19, memory: 0.5, sm: 0.2},
	{node: "dgx-1", bus: "c3", device: "mps", namespace: "serving", name: "api-2", requested: 19, memory: 0.6, sm: 0.2},
	{node: "edge-3", bus: "17", device: "timeslice", namespace: "edge", name: "camera-0", requested: 5, memory: 0.5, sm: 0.25},
	{node: "edge-3", bus: "17", device: "timeslice", namespace: "edge", name: "camera-1", requested: 5, memory: 0.5, sm: 0.25},
	{node: "edge-3", bus: "17", device: "timeslice", namespace: "edge", name: "camera-2", requested: 5, memory: 0.5, sm: 0.25},
	{node: "edge-3", bus: "31", device: "mps", namespace: "edge", name: "speech", requested: 5, memory: 0.7, sm: 0.3},
	{node: "edge-3", bus: "b1", namespace: "edge", name: "transcode", memory: 0.4, sm: 0.6},
}

// has reports whether the claim is there at a time before the end.
func (c *claim) has(before time.Duration) bool {
	return (c.since == 0 || before <= c.since) && before >= c.until
}
