// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package device turns the facts about a node's GPUs into what the node
// publishes: devices with attributes and capacities, the counters they draw
// on, and the ResourceSlices that hold both. It is pure: the same facts always
// give the same slices, byte by byte, and nothing here does IO.
//
// # Which devices
//
//	GPU                                   published
//	cannot be partitioned                 the whole GPU
//	MIG mode follows the claims (Hopper+) the whole GPU and every profile at every placement
//	MIG mode fixed, on (Ampere)           every profile at every placement
//	MIG mode fixed, off (Ampere)          the whole GPU
//
// Profiles and placements are those that the driver reports.
//
// # Names
//
// A GPU is named by its PCI address, gpu-0000-1b-00-0. A partition adds its
// profile and the first memory slice of its placement,
// gpu-0000-1b-00-0-mig-1g10gb-me-4. In the profile's first part dots are
// dropped; a "+" variant is joined with "-" and a "-" variant with "-no-", so
// that 1g.24gb+me, 1g.24gb-me and 1g.24gb+me.all become 1g24gb-me,
// 1g24gb-no-me and 1g24gb-me-all. Where two profiles of a GPU would get the
// same text, or the name would be too long, the text is "p" and the driver's
// profile ID.
//
// # Counters
//
// A GPU that publishes partitions has one counter set, named like the GPU, with
// one counter of value 1 for each memory slice. Disjoint placements are nearly
// all that the hardware asks for; what else it limits (decoders, encoders, JPEG
// and OFA engines, copy engines, multiprocessors, compute slices, instances of
// one profile) gets a counter only where some set of disjoint placements could
// exceed it, and where no other counter implies it. On an H100 that is the OFA
// engine, which only the +me profile and the undivided GPU use. The whole GPU
// draws all of every counter.
//
// # Order
//
// The scheduler takes the first device that fits, so the order is a promise:
//
//   - Slices: first those with counter sets, then one per GPU by PCI address.
//   - Devices of a GPU: from least to most. Profiles by size in memory slices,
//     then compute slices, then media engines (so that the scarce +me comes
//     after the plain profile), then ID; the whole GPU last. A request that
//     names only what it needs ("at least 10Gi") therefore gets the smallest
//     device that will do, and never a whole GPU where a partition is enough.
//     A request for a whole GPU passes over the partitions of a free GPU first,
//     about 25 evaluations of its class selector; on a GPU in use they have to
//     be looked at in any order.
//   - Placements of a profile: see orderShapes.
//
// # Status
//
// An inventory is made of facts that do not change. [Inventory.With] adds what
// does: a device for each partition that somebody else made, named like the one
// that could be made in its place with "-static" after it, and taints. These
// devices come before the others of their GPU: the partition is there already
// and nothing else fits in its place, so a request that it satisfies had better
// have it than a part of a free GPU.
//
// No device is ever left out for its status, because it may be allocated. For the
// same reason [Inventory.Keeping] takes over the GPUs that are not found any
// more. 16 places of a GPU's slice are kept free for static devices.
//
// A device is tainted for what overlaps it, and for an instance elsewhere that
// has the engines which it needs: counters say nothing about what no claim has.
// All taints of a GPU depend on that GPU only, so that a change is one update of
// one slice. Taints have the effect NoSchedule; what runs is left alone.
//
// # Capacities that are not known
//
// Every device has every capacity. The driver tells the engines and
// multiprocessors of GPUs with MIG only; elsewhere they are 0, which means
// "not known" and satisfies no request for at least some. A capacity that is
// left out would be worse: a CEL selector that reads it fails, and one such
// device anywhere on a node ends the scheduling attempt of the pod.
package device
