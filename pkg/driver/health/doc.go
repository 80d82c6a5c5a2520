// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package health finds out what is wrong with the GPUs of a node, and when it is over.
//
//	xid.go      what the driver's error numbers mean, a table
//	judge.go    makes faults of events and readings, and decides when they end; it is pure
//	reading.go  what a reading says
//	render.go   makes conditions of faults
//	history.go  the file that outlives the process
//	monitor.go  reads at intervals; events.go receives events
//
// A fault ends by proof: because it has not happened for a while, a reading says that it is
// gone, or the GPU was reset. No event ends or lowers another one's. Who fails again and
// again has to wait longer each time.
package health
