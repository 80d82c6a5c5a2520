// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claim turns an allocated ResourceClaim into devices on this node, and back.
//
//	claim --plan--> wanted record --converge--> for each GPU: observe, decide, act --> CDI spec --> record: prepared
//
// It is a facade. What a claim's allocation means is in package plan; what is next on a GPU, and what is wrong with it, in
// package rules; package converge observes and acts; what was done is written down by package record; package spec writes
// what containers get; package lock keeps calls and processes apart.
//
// A claim is prepared completely or not at all, whatever dies in between. The record says what will be done before it is
// done, by physical address, so that another process finds it by that address after a crash; and it is all that Unprepare
// needs. Nobody waits for a GPU while holding another. What a call cannot finish is left to [Manager.Reconcile]. What the
// kubelet never asks to release is found by [Manager.ReleaseOrphans], which compares the records with the API server.
//
// Below the data folder, whose bytes are the locks, are the files of package record, and
//
//	limits/<uid>/   a small file system in memory for an interposer library
package claim
