// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claim turns an allocated ResourceClaim into devices on this node, and
// back.
//
//	claim --plan--> record --groups--> for each: check, journal, apply --> CDI spec --> journal: prepared
//
// It is a facade. What is done to a device is in package step, one file for each kind of
// effect; what a claim's allocation means is in package plan; what was done is written
// down by package journal; package lock keeps calls and processes apart; package survey
// compares the journal with the hardware.
//
// A claim is prepared completely or not at all, whatever dies in between. The record says
// what will be done before it is done, by physical address, so that another process finds
// it by that address after a crash; and it is all that Unprepare needs.
//
// Work is done by group: the devices of one GPU, or of the GPUs of one MPS session. Groups
// do not wait for each other, and nobody waits for a GPU while holding another. What a
// call cannot finish is left to [Manager.Reconcile]. What the kubelet never asks to release
// is found by [Manager.ReleaseOrphans], which compares the journal with the API server.
//
// Below the data folder are the files of package journal, and
//
//	locks/          a file for the locks of claims and GPUs
//	limits/<uid>/   a small file system in memory for an interposer library
package claim
