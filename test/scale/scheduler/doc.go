// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package scheduler measures what published devices cost the Kubernetes scheduler, with
// Kubernetes' own benchmark scheduler_perf: an API server with an etcd, the scheduler and the controller
// of claims in one process, nodes that exist in the API only, and pods that are created as fast as
// possible.
//
// A case is a load on a fleet. scheduler_perf runs cases one after the other, each in an API server
// of its own; what it lacks is added where it lets others in: after the nodes are created, [prepare]
// publishes the slices, allocates what is in use already, and measures how much of the heap that takes. A CPU
// profile says how much of the process the scheduler is.
package scheduler
