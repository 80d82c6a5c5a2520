// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package converge brings GPUs to what the records of claims say, by the rules of package rules.
//
//	observe.go    one bounded reading of everything that is known about a GPU; records.go is its part about claims
//	act.go        carries out one task under the locks of its GPUs; act_record.go is its part about records, specs and sessions
//	round.go      locks, observes, decides and acts once
//	prepare.go    repeats that for a call until its claim is ready,
//	finish.go     until it is released,
//	converge.go   and for a GPU until nothing is left to do
//
// It has no rules of its own. What it remembers is for pace and for people: why something failed last, and what could
// not be made because somebody uses the GPU.
package converge
