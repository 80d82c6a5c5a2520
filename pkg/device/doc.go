// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package device turns the facts about a node's GPUs into what the node
// publishes: devices with attributes and capacities, the counters they draw
// on, and the ResourceSlices that hold both. It is pure: the same facts and the
// same policy always give the same slices, byte by byte, and nothing here does IO.
//
// # Which devices
//
//	GPU                                   can be
//	cannot be partitioned                 the whole GPU and shares of it
//	MIG mode follows the claims (Hopper+) all that follows
//	MIG mode fixed, on (Ampere)           every profile at every placement, and shares of these
//	MIG mode fixed, off (Ampere)          the whole GPU and shares of it
//
// Profiles and placements are those that the driver reports. The policy chooses
// among what a GPU can be: which kinds, which profiles, shares of which profiles
// (none without a policy), for how many claims. There are two kinds of shares, MPS
// (from Volta on) and time slices, for any number of claims at a time each. What
// the hardware does not have of what the policy names is told as a problem.
//
// Shares need counters and consumable capacity in the cluster, partitions need
// counters. Without them only whole GPUs are published.
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
// A share adds its kind to the name of what is shared: gpu-0000-1b-00-0-mps,
// gpu-0000-1b-00-0-mig-1g10gb-4-timeslice.
//
// # Counters
//
// A GPU that can hold partitions has one counter set, named like the GPU, with
// one counter of value 1 for each memory slice. Disjoint placements are nearly
// all that the hardware asks for; what else it limits (decoders, encoders, JPEG
// and OFA engines, copy engines, multiprocessors, compute slices, instances of
// one profile) gets a counter only where some set of disjoint placements could
// exceed it, and where no other counter implies it. On an H100 that is the OFA
// engine, which only the +me profile and the undivided GPU use. The whole GPU
// draws all of every counter. Another GPU that is more than one device has a set
// with the single counter "gpu".
//
// A share draws what the device draws that is shared. The scheduler charges that
// once, with the first share, and gives it back with the last. So whole GPU,
// partitions and both kinds of shares exclude each other, and a GPU changes its
// role from claim to claim.
//
// The counters depend on the hardware only. The policy may leave out any device
// without changing what the others draw.
//
// # Shares
//
// All capacities of a share are divided among the claims. What one of them gets is
// written into its allocation as consumed capacity:
//
//	shares     1 unless it asks for more
//	memory     what it asks for in MiB, or an equal part
//	smPercent  what it asks for of the multiprocessors, or an equal part, at most 100
//	others     what it asks for, or nothing; the scheduler counts it and nothing enforces it
//
// Equal parts are those of as many claims as the policy admits. A claim that does not
// ask gets one and not all there is: without a limit it could take what the
// scheduler has promised to others.
//
// Time slices that no library in the containers limits have no part of the
// multiprocessors to give (smPercent is 0, which refuses requests for it), and
// their memory is counted only for claims that ask for some. With such a library
// they are like MPS.
//
// So that a request can name any capacity of any device, what one claim has alone
// has one share and 100 smPercent.
//
// # Order
//
// The scheduler takes the first device that fits, so the order is a promise. Per
// GPU: static devices, partitions, the whole GPU, shares of partitions, shares of
// the whole GPU.
//
//   - Slices: first those with counter sets, then one per GPU by PCI address.
//   - Exclusive devices of a GPU: from least to most. Profiles by size in memory slices,
//     then compute slices, then media engines (so that the scarce +me comes
//     after the plain profile), then ID; the whole GPU last. A request that
//     names only what it needs ("at least 10Gi") therefore gets the smallest
//     device that will do, and never a whole GPU where a partition is enough.
//     A request for a whole GPU passes over the partitions of a free GPU first,
//     about 25 evaluations of its class selector; on a GPU in use they have to
//     be looked at in any order.
//   - Placements of a profile: see orderShapes.
//   - Shares come last: on a free GPU nobody gets one who did not ask for it. A
//     request that admits any type has to expect one all the same, on a GPU that is
//     shared already; the classes of this driver ask for a type.
//   - Shares among each other: those of partitions in the order of partitions, MPS
//     before time slices, then -mps and -timeslice of the whole GPU. Where a policy
//     has shares of partitions, a request for "some MPS share" therefore fills up the
//     smallest partition that has enough, one after the other, before a whole GPU
//     is taken for it. The whole GPU's are those whose attribute "profile" is empty,
//     or what a request for more memory than a partition has gets.
//
// One request for several shares gets as many different devices; two shares of one
// device are two requests, or one that asks for a capacity of 2 shares.
//
// # Room
//
// A slice with counters holds 64 devices. Where that is not enough, what is left out
// first are shares of partitions, profile by profile, then shares of the whole GPU,
// then partitions; a profile with a variant ("+me") goes before one without. Each is
// told as a problem.
//
// # Withdrawn devices
//
// A device that the policy does not offer any more stays for as long as a claim may
// have it, see [Terms], with a taint. It comes before what the policy offers where a
// slice has no room for all. Whether MIG is on, where that needs a reset to change,
// is no matter of policy: what a GPU cannot be is not kept.
//
// # Status
//
// An inventory is made of facts that do not change. [Inventory.With] adds what
// does: a device for each partition that somebody else made, named like the one
// that could be made in its place with "-static" after it, and taints. It is there
// if the policy offers partitions of its profile, and never shared. These
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
