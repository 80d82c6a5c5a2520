// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package allocation asks the scheduler's own allocator what it would allocate to claims on the
// nodes of a fleet.Snapshot, and what it would allocate if something were different: a claim
// changed, other claims gone, a taint removed.
//
// A Planner is made of a Snapshot once and is never changed; Without returns another one, for other
// circumstances. A Cluster is what there is, in use or not. All methods may be called concurrently.
//
// Fleets are large and their nodes alike: nodes on which the allocator would see the same are searched once, unless the claims could tell
// their devices apart.
package allocation
