// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fragmentation finds room that is lost because partitions lie where larger ones would
// have to: what would fit if the partitions of a GPU, or of a node, lay closer together, and
// which claims would have to end so that a partition fits.
//
// Counters decide, as they do in the scheduler, and the scheduler's allocator confirms every
// suggestion before anybody sees it.
package fragmentation
