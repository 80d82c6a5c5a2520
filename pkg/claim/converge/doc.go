// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package converge brings GPUs to what the records of claims say, by the rules of package rules.
//
//	observe.go   one bounded reading of everything that is known about a GPU
//	act.go       carries out one task under the locks of its GPUs
//	once.go      locks, observes, decides and acts once
//	loop.go      repeats that: for a call until its claim is ready or released, and for a GPU until nothing is left to do
//
// It has no rules of its own. What it remembers is for pace and for people: why something failed last.
package converge
