// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package sliceset is the command slices: it writes ResourceSlices of nodes that do not exist
// yet, which package template makes.
package sliceset
