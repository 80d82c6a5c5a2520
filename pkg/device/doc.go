// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package device turns the facts about a node's GPUs into what the node
// publishes: devices with attributes and capacities, the counters they draw
// on, and the ResourceSlices that hold both. It is pure: the same facts and the
// same policy always give the same slices, byte by byte, and it does no IO.
//
// # Devices
//
//	GPU                                   can be
//	cannot be partitioned                 the whole GPU and shares of it
//	MIG mode follows the claims (Hopper+) all of the following
//	MIG mode fixed, on (Ampere)           every profile at every placement, and shares of these
//	MIG mode fixed, off (Ampere)          the whole GPU and shares of it
//
// Profiles and placements are those that the driver reports. The policy chooses
// from what a GPU can be: which kinds, which profiles (all but the variants "+me"
// and the like without a policy), shares of which profiles (none without a policy),
// for how many claims. There are two kinds of shares, MPS
// (from Volta on) and time slices, each for any number of claims at the same time.
// Profiles and numbers in the policy that the hardware does not support are
// reported as problems.
//
// Beside all that, each GPU has an observer for claims with admin access.
//
// Shares need counters and consumable capacity in the cluster, partitions need
// counters. Without them only whole GPUs are published.
//
// # Names
//
// A GPU is named by its PCI address, gpu-0000-1b-00-0. A partition adds its profile, as
// profileTexts spell it, and the first memory slice of its placement,
// gpu-0000-1b-00-0-mig-1g10gb-me-4. A share adds its kind to the name of what is shared,
// gpu-0000-1b-00-0-mig-1g10gb-4-timeslice, and an observer is gpu-0000-1b-00-0-observer.
//
// # Counters
//
// A GPU that can hold partitions has one counter set, named like the GPU, with
// one counter of value 1 for each memory slice that decides anything, see
// decisiveSlices: seven of eight on an H100. Disjoint placements are nearly
// all that the hardware requires; its other limits (decoders, encoders, JPEG
// and OFA engines, copy engines, multiprocessors, compute slices, instances of
// one profile) get a counter only where some set of disjoint placements could
// exceed them, and where no other counter implies them. On an H100 that is the OFA
// engine, which only the +me profile and the undivided GPU use.
//
// One counter more is there for tools that take quota from it: "memory" of the GPU, in
// bytes, of which a partition draws what it has. It refuses nothing that fits otherwise:
// where partitions that fit beside each other have more memory together than the driver
// reports of the GPU, it has as much as they. A GPU that holds no partitions has a set with
// this single counter, of which each of its devices draws all. Where the driver does not
// report the memory, as on systems that have one for processor and GPU, there is none, and
// the single counter is "gpu" with the value 1.
//
// The whole GPU draws all of the memory and of no other counter, since no partition is left any
// memory then. The same goes for a partition that leaves less memory than the smallest has.
//
// A share draws what the shared device draws. The scheduler charges that once,
// with the first share, and gives it back with the last. So the whole GPU,
// partitions and both kinds of shares exclude each other, and a GPU changes its
// role from claim to claim.
//
// The counters depend on the hardware only. The policy may leave out any device
// without changing what the others draw.
//
// # Shares
//
// All capacities of a share are divided among the claims. The part of a claim is
// written into its allocation as consumed capacity:
//
//	shares           1 unless it requests more
//	memory           what it requests in MiB, or an equal part
//	smPercent        what it requests of the multiprocessors, or an equal part, at most 100
//	multiprocessors  what it requests, or nothing; the scheduler counts it and nothing enforces it
//
// The memory that is divided is what remains of the device's when the driver, the MPS
// server and a context of each claim have theirs, so that all claims can use all of
// their parts at the same time; exclusive devices have what the driver reports.
//
// Equal parts are those of as many claims as the policy admits. A claim without a
// request gets one rather than everything: without a limit it could take what the
// scheduler has promised to others.
//
// Time slices that no library in the containers limits have no part of the
// multiprocessors to give (smPercent is 0, which refuses requests for it), and
// their memory is counted only for claims that request some. With such a library
// they are like MPS.
//
// A whole GPU has 100 smPercent, so that a request which names its needs can be for a share or a
// whole GPU.
//
// Of attributes all devices have the same, of capacities those of a kind do, and whole GPUs
// and partitions have all that NVIDIA's DRA driver gives them. See attributesOf and capacitiesOf.
//
// # Size
//
// Every process that caches ResourceSlices (API servers, schedulers, controllers) holds
// those of all nodes, nearly all of it in maps of attributes and capacities. For each
// device that it considers, the scheduler copies them once for each selector. With the 15th
// attribute Go doubles a map of them, by 2.3 KB, and with the 29th again. So an attribute of our own
// has to be worth it, and a device that few claims need is published on request. testdata/sizes.txt
// has the sizes of nodes.
//
// # Order
//
// The scheduler takes the first device that fits, so the order is a promise. Per
// GPU: static devices, partitions, the whole GPU, shares of partitions, shares of
// the whole GPU, the observer.
//
//   - Slices: first those with counter sets, then one per GPU by PCI address.
//   - Exclusive devices of a GPU: from smallest to largest. Profiles by size in memory
//     slices, then compute slices, then media engines (so that the scarce +me comes
//     after the plain profile), then ID; the whole GPU last. A request that
//     names only its needs ("at least 10Gi") therefore gets the smallest sufficient
//     device, and never a whole GPU where a partition is enough. A request for a
//     whole GPU has to pass over the partitions of a free GPU first, about 25
//     evaluations of its class selector; on a GPU in use they are evaluated in any
//     order.
//   - Placements of a profile: see orderShapes.
//   - Shares come last: on a free GPU no claim gets one without asking for it. A
//     request that admits any type may still get one on a GPU that is shared
//     already; the classes of this driver ask for a type.
//   - Shares among each other: those of partitions in the order of partitions, MPS
//     before time slices, then -mps and -timeslice of the whole GPU. Where a policy
//     has shares of partitions, a request for "some MPS share" therefore fills up the
//     smallest sufficient partitions, one after the other, before it takes a whole
//     GPU. To select shares of the whole GPU, ask for an empty "profile" or for more
//     memory than a partition has.
//
// One request for several shares gets as many different devices; two shares of one
// device are two requests, or one with a capacity of 2 shares.
//
// # Room
//
// A slice with counters holds 64 devices. Where that is not enough, shares of
// partitions are left out first, profile by profile, then shares of the whole GPU,
// then partitions; a profile with a variant ("+me") before one without. Each is
// reported as a problem.
//
// # Withdrawn devices
//
// A device that the policy does not offer any more stays, with a taint, as long as a
// claim may have it, see [Terms]. It takes no room from those that the policy offers:
// where the GPU's slice is full it is in a further one, until it goes. Whether MIG is
// on, where that needs a reset to change, is not a matter of policy: a device that the
// GPU cannot be is not kept.
//
// # Status
//
// An inventory is made of facts that do not change. [Inventory.With] adds those
// that do: a device for each partition that somebody else made, with the name of the
// one that could be made in its place and "-static", and taints. A static device is
// published if the policy offers partitions of its profile, and never shared. It
// comes before the other devices of its GPU: the partition exists and nothing else
// fits in its place, so a request that it satisfies had better get it than a part
// of a free GPU.
//
// No device is ever left out for its status, because it may be allocated. For the
// same reason an inventory is made of the GPUs that are not found any more, too (see
// [gpu.Node.Keeping]). 16 places in a GPU's slice are reserved for static devices.
//
// A device is tainted for what overlaps it, and for an instance elsewhere that uses
// the engines it needs: counters do not cover what no claim has. All taints of a GPU
// depend on that GPU only, so that a change is one update of one slice. Taints have
// the effect NoSchedule, which leaves running pods alone.
//
// # Unknown capacities
//
// The driver reports the engines and multiprocessors only of GPUs with MIG; elsewhere they
// are 0, which satisfies no request for one or more. Leaving a capacity out would be worse:
// a CEL selector that reads it fails, which ends the scheduling attempt of the pod.
package device
