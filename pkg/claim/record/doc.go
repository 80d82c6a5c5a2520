// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package record keeps on disk what claims have on this node: one record per claim, written before anything is done for it
// and gone when nothing is left. A record names devices by physical address, so that another process finds them again after
// a crash, and it is all that a release needs. Below the data folder are files of one kind:
//
//	records/<uid>.<boot id>      the record of a claim, or when it was released
//	records/<uid>.<boot id>.<n>  the same, where a file of each other name cannot be read
//
// What cannot be read is neither changed nor moved, since another version may read it: it guards what it may be about, and
// the next free name is taken. The name says in which boot a file was written, whatever has become of its content: nothing
// of another boot is left on the hardware.
//
// A file is one line, the head, and a body of JSON. The head says what changes while a claim lives, with a fixed width, so
// that a release needs no space on the disk. What cannot be written all the same is kept in memory until it can.
//
// The format only grows. A field of the body that an older version did not write reads as its zero value, which means what
// that version did. One that a newer version wrote is ignored, and lost when the body is written again, which a release
// never does. What an older version must not ignore gets a new type of device, a new state or another version of the head:
// what it does not know it does not touch.
package record
