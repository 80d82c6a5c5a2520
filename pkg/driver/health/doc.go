// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package health finds faults of the GPUs of a node, and when they are over.
//
//	judge.go    makes faults of events and readings, and decides when they end; it is pure. What XIDs mean is in pkg/policy/xid
//	reading.go  the faults that a reading shows
//	render.go   makes conditions of faults
//	history.go  the file that outlives the process
//	monitor.go  reads at intervals; events.go receives events
//
// A fault ends only if there is proof: it has not happened for a while, a reading does not show it
// any more, or the GPU was reset. No event ends or lowers the fault of another one. A GPU that fails
// again and again is held back for longer each time.
package health
