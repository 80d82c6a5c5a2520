// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claim turns an allocated ResourceClaim into devices on this node, and
// back.
//
//	claim --Plan--> steps --journal: preparing--> apply --> CDI spec --> journal: prepared
//
// Between apply and the spec what is shared is made so: MPS sessions are started,
// time slices set, folders for software limits made. A session, or a partition, that
// claims have shares of comes with the first and goes with the last of them; which
// that is follows from the journal, under the lock of the GPU.
//
// A claim is prepared completely or not at all, whatever dies in between. The
// journal is one file per claim. It says what will be done before it is done,
// by physical address, so that another process finds it by that address after a
// crash; and it is all that Unprepare needs.
//
// GPUs are independent: a claim holds the locks of its own GPUs only, and waits for
// them holding none. The locks are file locks, because two instances of the plugin
// run side by side during an upgrade. A GPU on which a call does not return stays
// locked until it does.
//
// What a call cannot finish is left to [Manager.Reconcile], which also compares
// the journal with the API server. [Manager.Survey] compares it with the hardware.
//
// Below the data folder are:
//
//	claims/<uid>.json               the journal
//	locks/                          locks of claims and GPUs
//	released/<uid>                  when a claim was released, for calls that come too late
//	quarantine/<boot id>/<uid>.json damaged files of the journal, for people
//	limits/<uid>/                   what an interposer library keeps of a claim
package claim
