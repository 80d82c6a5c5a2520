// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package journal keeps on disk what claims have on this node: one record per
// claim, written before anything is done for it and removed when nothing is left.
//
// A record names the effects by physical address, so that another process finds
// them again after a crash, and it is all that a release needs. Below the data
// folder are:
//
//	claims/<uid>.json               the records
//	boot                            the boot in which the journal was last opened
//	released/<uid>                  tombstones: when a claim was released
//	quarantine/<boot id>/<uid>.json damaged records, for people
//
// The format only grows. A field that an older version did not write reads as its
// zero value, which means what that version did. What an older version must not
// ignore gets a new value where it refuses unknown ones.
package journal
