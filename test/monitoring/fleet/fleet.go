// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet makes up what Prometheus would have recorded of three nodes with GPUs over
// some hours: samples under the names of docs/reference/metrics.md, with what happens in such a time.
// Claims come and go, some use what they have and some do not, one GPU is lost.
package fleet

import "time"

// End is when the recording ends. It is a fixed time, so that pictures of it stay the same.
var End = time.Date(2026, time.March, 5, 14, 0, 0, 0, time.UTC)

// namespace and daemonSet are those of the driver.
const (
	namespace = "partage"
	daemonSet = "partage-gpu-kubelet-plugin"
)

const gib = 1 << 30

// model is a kind of GPU.
type model struct {
	product, architecture string
	// memory is in GiB; slices is how many memory slices it has for partitions, or 0.
	memory float64
	slices int
}

var (
	h100 = model{"NVIDIA H100 80GB HBM3", "Hopper", 80, 8}
	a100 = model{"NVIDIA A100-SXM4-40GB", "Ampere", 40, 8}
	l4   = model{"NVIDIA L4", "Ada Lovelace", 23, 0}
)

// gpu is a GPU, and for how long before the end it has been lost.
type gpu struct {
	node, address string
	model         model
	lost          time.Duration
	throttled     string
}

// claim is a claim with one device.
type claim struct {
	namespace, name string
	gpu             *gpu
	kind, profile   string
	// first and slices are the place of a partition.
	first, slices int
	// requested is in GiB; memory and sm are the parts of it and of the multiprocessors
	// that are used.
	requested, memory, sm float64
	// since and until are times before the end.
	since, until time.Duration
	// idle is for how long before the end nothing has run.
	idle time.Duration
}

// gpus are the GPUs of all nodes.
func gpus() map[string]*gpu {
	all := map[string]*gpu{}
	add := func(node string, m model, addresses ...string) {
		for _, address := range addresses {
			all[node+" "+address] = &gpu{node: node, address: "0000:" + address + ":00.0", model: m}
		}
	}
	add("dgx-1", h100, "1b", "43", "52", "61", "9d", "c3", "d1", "df")
	add("hgx-2", a100, "0b", "48", "88", "c8")
	add("edge-3", l4, "17", "31", "b1", "ca")
	all["hgx-2 88"].lost = 100 * time.Minute
	all["dgx-1 df"].throttled = "HardwareThermalSlowdown"
	return all
}

// claims are those of the recording, in the order of their names.
func claims(all map[string]*gpu) []claim {
	const h = time.Hour
	on := func(key, namespace, name string) claim {
		return claim{gpu: all[key], namespace: namespace, name: name, since: 100 * h}
	}
	var list []claim
	whole := func(c claim, memory, sm float64) {
		c.kind, c.requested, c.memory, c.sm = "gpu", c.gpu.model.memory, memory, sm
		list = append(list, c)
	}
	partition := func(c claim, profile string, first, slices int, memory, sm float64) {
		c.kind, c.profile, c.first, c.slices, c.memory, c.sm = "mig", profile, first, slices, memory, sm
		c.requested = c.gpu.model.memory / 8 * float64(slices)
		list = append(list, c)
	}
	share := func(c claim, kind string, requested, memory, sm float64) {
		c.kind, c.requested, c.memory, c.sm = kind, requested, memory, sm
		list = append(list, c)
	}

	llm := on("dgx-1 1b", "research", "llm-train-0")
	llm.since = 4*h + 20*time.Minute
	whole(llm, 0.93, 0.9)
	llm.gpu, llm.name = all["dgx-1 43"], "llm-train-1"
	whole(llm, 0.91, 0.87)
	forgotten := on("dgx-1 9d", "sandbox", "notebook-mia")
	forgotten.idle = 5 * h
	whole(forgotten, 0.02, 0)
	whole(on("dgx-1 df", "research", "diffusion"), 0.78, 0.7)

	partition(on("dgx-1 52", "serving", "chat-a"), "3g.40gb", 0, 4, 0.82, 0.55)
	partition(on("dgx-1 52", "serving", "embed-b"), "2g.20gb", 4, 2, 0.45, 0.3)
	batch := on("dgx-1 52", "batch", "score-17")
	batch.since = 35 * time.Minute
	partition(batch, "1g.10gb", 6, 1, 0.6, 0.8)
	partition(on("dgx-1 61", "serving", "rerank"), "2g.20gb", 0, 2, 0.35, 0.2)
	partition(on("dgx-1 61", "sandbox", "notebook-ben"), "1g.10gb", 2, 1, 0.15, 0.03)
	partition(on("dgx-1 61", "sandbox", "notebook-eva"), "1g.10gb", 3, 1, 0.55, 0.12)
	for i, name := range []string{"score-11", "score-12", "score-13"} {
		c := on("dgx-1 61", "batch", name)
		c.since, c.until = time.Duration(5-i)*h, time.Duration(4-i)*h+20*time.Minute
		partition(c, "3g.40gb", 4, 4, 0.7, 0.9)
	}
	partition(on("hgx-2 0b", "serving", "vision-a"), "3g.20gb", 0, 4, 0.7, 0.5)
	partition(on("hgx-2 0b", "serving", "vision-b"), "3g.20gb", 4, 4, 0.65, 0.45)
	ended := on("hgx-2 88", "research", "ablation-4")
	ended.until = 95 * time.Minute
	whole(ended, 0.8, 0.9)
	partition(on("hgx-2 c8", "sandbox", "notebook-lea"), "1g.5gb", 6, 1, 0.3, 0.05)

	for i, name := range []string{"api-0", "api-1", "api-2"} {
		share(on("dgx-1 c3", "serving", name), "mps", 19, 0.4+0.1*float64(i), 0.2)
		share(on("edge-3 17", "edge", "camera-"+name[4:]), "timeslice", 5, 0.5, 0.25)
	}
	share(on("edge-3 31", "edge", "speech"), "mps", 5, 0.7, 0.3)
	whole(on("edge-3 b1", "edge", "transcode"), 0.4, 0.6)
	return list
}
