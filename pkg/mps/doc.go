// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package mps is the protocol between the kubelet plugin and the MPS supervisor of
// its node: what a session is, its status, a client, and the service that a
// supervisor registers. Package supervisor runs the sessions.
//
// A session is an MPS control daemon with its server, for a set of GPUs or for one
// MIG partition. The supervisor runs on the node by itself, so that MPS outlives
// every restart and upgrade of the plugin: clients die with their server.
package mps
