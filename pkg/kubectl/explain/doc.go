// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package explain says why a pod or a claim waits, why a pod is stuck, or what it got.
//
// The verdict is the scheduler's own allocator's. The reasons are found by predicates of this
// package that look at each device the way the allocator does, and tests hold the two against
// each other. What would help is tried with the allocator before it is said.
package explain
