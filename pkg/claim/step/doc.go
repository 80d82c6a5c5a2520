// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package step holds the effects that make a claim's devices exist, one file for each
// kind. The steps of a claim follow from its record alone: one list is walked forwards
// to prepare the claim, and backwards to undo a failed preparation and to release it.
//
//	partition.go   a MIG partition that is made for claims
//	existing.go    a partition that is used or observed as it is
//	whole.go       a whole GPU
//	session.go     an MPS session
//	interval.go    a time slice
//	softlimits.go  the folder of an interposer library
//	cdispec.go     the claim's CDI spec
//
// The steps on one GPU, and on the GPUs of one MPS session, are a [Group]. Each group
// has its own locks and its own part of the record, so that groups do not wait for each
// other. The last two kinds belong to the claim and come after all groups.
package step
