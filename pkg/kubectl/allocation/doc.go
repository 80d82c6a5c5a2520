// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package allocation asks the scheduler's own allocator what it would allocate to claims on the
// nodes of a fleet.Snapshot, and what it would allocate if something were different: a claim
// changed, other claims gone, a taint removed.
//
// A Planner is made of a Snapshot once and is never changed; Without returns another one, for other
// circumstances. A Cluster is what there is, whoever has it. All methods may be called concurrently.
//
// Fleets are large and their nodes alike. Two things make an answer for 500 nodes cheap, and
// neither changes it: the allocator sees only those devices of a node that a request of the
// claims could select, together with all allocated ones, and nodes on which it would see the
// same are searched once.
package allocation
