// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet measures what the driver costs the control plane of a large cluster: real etcd,
// API server, scheduler and controller manager, nodes that kwok plays, and on each of them a real
// plugin, all of them in this process, each with clients and a connection of its own. Only what is
// below a plugin is not real: it finds GPUs of a model in package boards, and has no claims.
//
//	node.go      a plugin and its GPUs
//	cluster.go   the objects that the plugins need
//	traffic.go   what the plugins ask of the API server
//	process.go   what the control plane uses
//	phase.go     one thing that happens to all nodes, until it is over
//	bench.go     all of them in a row
//	report.go    the tables
package fleet
