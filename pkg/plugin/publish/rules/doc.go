// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package rules decides which request about the ResourceSlices of a node is due first.
//
//	desire    Want: the slices that there should be, with the taints that hold now
//	observe   Stored: what the API server has, as far as is known
//	decide    Decide(Want, Stored, Memory, now) -> one write, and whether what is stored is right
//	act       carries out that write, takes the answer for what is stored, and asks again
//
// So there is no plan that could be out of date, and none that a crash interrupts. Nothing is remembered of who changed what,
// or of what was said last, in order to decide what is right: Memory is for pace. With an empty one the same is written, at
// another time. Package model explores the rules together with a cluster that goes wrong.
//
//	decide.go       what is written first
//	generation.go   which slices can be changed one by one
//	taints.go       taints, and how long one stays that nobody wants any more
//	memory.go       the pace: what an answer does to it
package rules
