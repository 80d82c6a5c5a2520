// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package rules decides what happens to the claims on one GPU.
//
//	observe   an Observation: the records that want or had something on the GPU, its hardware, the CDI specs
//	decide    Decide(Observation) -> tasks, statements, and one verdict for each record
//	act       carries out one task under the lock of the GPU, then it is observed again
//
// Prepare, Unprepare, reconciliation and the recovery after a crash are the same loop. The rules have no effects and
// no memory; package model explores them together with a world that goes wrong.
package rules
