// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package neighbour finds out what else on the node gives out its GPUs.
//
//	software.go   NVIDIA's device plugin, its DRA driver, and a MIG manager
//	claims.go     claims that another driver of the same name has prepared
//	kubelet.go    what the kubelet says about them
//	checkpoint.go what NVIDIA's DRA driver has written down about them
//	processes.go  which pods have processes
//
// It reads and changes nothing.
package neighbour
