// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package doctor examines whether a cluster is set up so that claims for GPUs work: the
// driver's pods, what it publishes, the classes, what else hands out GPUs, versions, and
// claims that are stuck. Each finding has its remedy.
//
// A check is a function over Facts, which were read before. It never asks the API server.
package doctor
