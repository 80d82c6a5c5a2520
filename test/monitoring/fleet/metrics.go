// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"slices"
	"strconv"
	"time"
)

// seriousXIDs are some of those that are exported before the first.
var seriousXIDs = []int{48, 63, 64, 74, 79, 94, 95, 119}

const driverVersion = "580.105.08"

// gpu writes what the driver says about a GPU.
func (r *recording) gpu(g *gpu, asked []claim) {
	mine := slices.DeleteFunc(slices.Clone(asked), func(c claim) bool { return c.gpu != g })
	base := scraped(g.node).with(labels{"gpu": g.address})
	lost := func(before time.Duration) bool { return g.lost > 0 && before < g.lost }
	// A sum over the claims that are there.
	sum := func(of func(c claim, before time.Duration) float64) func(time.Duration) float64 {
		return func(before time.Duration) float64 {
			total := 0.0
			for _, c := range mine {
				if c.has(before) {
					total += of(c, before)
				}
			}
			return total
		}
	}
	unlessLost := func(value func(time.Duration) float64) func(time.Duration) float64 {
		return func(before time.Duration) float64 {
			if lost(before) {
				return absent
			}
			return value(before)
		}
	}

	r.add("partage_gpu_info", base.with(labels{"uuid": uuid("GPU-", g.node+g.address), "product": g.model.product,
		"architecture": g.model.architecture, "driver_version": driverVersion}), always(1))
	r.add("partage_gpu_healthy", base, func(before time.Duration) float64 { return truth(!lost(before)) })
	if g.lost > 0 {
		r.add("partage_gpu_condition", base.with(labels{"reason": "gpu-lost", "effect": "NoSchedule"}),
			func(before time.Duration) float64 { return truth(lost(before)) })
	}
	for _, xid := range seriousXIDs {
		r.add("partage_gpu_xid_errors_total", base.with(labels{"xid": strconv.Itoa(xid)}),
			func(before time.Duration) float64 {
				return truth(xid == 79 && lost(before) || xid == 63 && g.throttled != "" && before < 22*time.Minute)
			})
	}
	if g.throttled != "" {
		r.add("partage_gpu_throttled", base.with(labels{"reason": g.throttled}),
			func(before time.Duration) float64 { return truth(before < 70*time.Minute) })
	}
	for _, role := range []string{"free", "whole", "partitioned", "mps", "timeslice", "unavailable"} {
		r.add("partage_gpu_role", base.with(labels{"role": role}), func(before time.Duration) float64 {
			return truth(role == g.role(mine, before, lost(before)))
		})
	}
	r.add("partage_gpu_memory_bytes", base, always(g.model.memory*gib))
	r.add("partage_gpu_memory_allocatable_bytes", base, func(before time.Duration) float64 { return truth(!lost(before)) * g.model.memory * gib })
	r.add("partage_gpu_memory_allocated_bytes", base, sum(func(c claim, _ time.Duration) float64 { return c.requested * gib }))
	r.add("partage_gpu_memory_used_bytes", base, unlessLost(sum(func(c claim, before time.Duration) float64 { return c.used(before) })))
	busy := unlessLost(sum(func(c claim, before time.Duration) float64 { return c.busy(before) }))
	r.add("partage_gpu_utilization_ratio", base, func(before time.Duration) float64 {
		// NVML does not report it in MIG mode.
		if g.role(mine, before, false) == "partitioned" {
			return absent
		}
		return busy(before)
	})
	r.slices(g, mine, base)
	r.devices(g, mine, base, lost)
}

// role is what a GPU is used for.
func (g *gpu) role(mine []claim, before time.Duration, lost bool) string {
	if lost {
		return "unavailable"
	}
	for _, c := range mine {
		if c.has(before) {
			return map[string]string{"gpu": "whole", "mig": "partitioned"}[c.kind] + map[string]string{"mps": "mps", "timeslice": "timeslice"}[c.kind]
		}
	}
	return "free"
}

// slices writes who has the memory slices of a GPU. One without MIG counts as one slice;
// one that is shared has the device and no claim.
func (r *recording) slices(g *gpu, mine []claim, base labels) {
	for slice := range max(1, g.model.slices) {
		var users []claim
		for _, c := range mine {
			if c.kind != "mig" || slice >= c.first && slice < c.first+c.slices {
				users = append(users, c)
			}
		}
		at := base.with(labels{"slice": strconv.Itoa(slice)})
		written := map[string]bool{}
		for _, c := range users {
			holder := labels{"namespace": c.namespace, "resourceclaim_name": c.name, "device": c.device()}
			if c.shared() {
				holder["namespace"], holder["resourceclaim_name"] = "", ""
			}
			if key := holder.String(); !written[key] {
				written[key] = true
				r.add("partage_gpu_memory_slice", at.with(holder), c.while(always(1)))
			}
		}
		r.add("partage_gpu_memory_slice", at.with(labels{"namespace": "", "resourceclaim_name": "", "device": ""}), func(before time.Duration) float64 {
			if slices.ContainsFunc(users, func(c claim) bool { return c.has(before) }) {
				return absent
			}
			return 0
		})
	}
}

// offers says what a GPU without claims has to offer: how many of which device.
func (g *gpu) offers() map[[2]string]float64 {
	offers := map[[2]string]float64{{"gpu", ""}: 1, {"mps", ""}: 1, {"timeslice", ""}: 1}
	if g.model.slices > 0 {
		unit := int(g.model.memory / 8)
		for slices, compute := range map[int]int{1: 1, 2: 2, 4: 3, 8: 7} {
			offers[[2]string{"mig", strconv.Itoa(compute) + "g." + strconv.Itoa(slices*unit) + "gb"}] = float64(8 / slices)
		}
	}
	return offers
}

// devices writes how many devices of each kind are in which state.
func (r *recording) devices(g *gpu, mine []claim, base labels, lost func(time.Duration) bool) {
	for device, total := range g.offers() {
		at := base.with(labels{"kind": device[0], "profile": device[1]})
		state := func(before time.Duration) (allocated, free float64) {
			slicesUsed, other := 0, false
			for _, c := range mine {
				if !c.has(before) {
					continue
				}
				if c.kind == device[0] && c.profile == device[1] {
					allocated = min(allocated+1, total)
				}
				slicesUsed += c.slices
				other = other || c.kind != device[0]
			}
			free = total - allocated
			switch {
			case other:
				free = 0
			case device[0] == "mig":
				free = math.Floor(float64(8-slicesUsed) / (8 / total))
			}
			return allocated, free
		}
		for _, name := range []string{"free", "allocated", "blocked", "tainted"} {
			r.add("partage_devices", at.with(labels{"state": name}), func(before time.Duration) float64 {
				allocated, free := state(before)
				switch {
				case lost(before):
					return truth(name == "tainted") * total
				case name == "free":
					return free
				case name == "allocated":
					return allocated
				case name == "blocked":
					return total - allocated - free
				default:
					return 0
				}
			})
		}
	}
}

// shared reports whether others can have the device, too.
func (c claim) shared() bool { return c.kind == "mps" || c.kind == "timeslice" }

// used is how much memory a claim uses, in bytes; busy, how much of its multiprocessors.
func (c claim) used(before time.Duration) float64 {
	return min(c.requested*c.memory*wave(c.name)(before), c.requested) * gib
}

func (c claim) busy(before time.Duration) float64 {
	if before < c.idle {
		return 0
	}
	return min(c.sm*wave(c.name+" sm")(before), 1)
}

// claim writes what the driver says about a claim.
func (r *recording) claim(c claim) {
	id := c.gpu.node + c.gpu.address + c.name
	prefix := "GPU-"
	if c.kind == "mig" {
		prefix = "MIG-"
	}
	base := scraped(c.gpu.node).with(labels{"namespace": c.namespace, "resourceclaim_name": c.name, "device": c.device(),
		"uuid": uuid(prefix, id), "kind": c.kind, "profile": c.profile})
	r.add("partage_claim_info", base.with(labels{"pod": c.name, "gpu": c.gpu.address, "resourceclaim_uid": uuid("", id)}), c.while(always(1)))
	r.add("partage_claim_memory_requested_bytes", base, c.while(always(c.requested*gib)))
	r.add("partage_claim_memory_limit_bytes", base, c.while(always(c.requested*gib)))
	r.add("partage_claim_memory_used_bytes", base, c.while(c.used))
	r.add("partage_claim_memory_peak_bytes", base, c.while(always(min(c.requested, c.requested*c.memory*1.1)*gib)))
	if c.kind != "mig" {
		r.add("partage_claim_sm_utilization_ratio", base, c.while(c.busy))
	}
	r.add("partage_claim_processes", base, c.while(always(1)))
	r.add("partage_claim_throttled", base, c.while(func(before time.Duration) float64 {
		return truth(c.gpu.throttled != "" && before < 70*time.Minute)
	}))
	r.add("partage_claim_idle_seconds", base, c.while(func(before time.Duration) float64 {
		return max(0, (c.idle - before).Seconds())
	}))
}

// truth is 1 for true.
func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
