// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet reads what a cluster has that concerns GPUs, and makes a model of it: nodes,
// their GPUs, the devices of each, and which claims and pods have them.
//
// A Snapshot is what was read, a Model what follows from it. Both are never changed once they
// are made, so that any number of goroutines may read them.
package fleet
