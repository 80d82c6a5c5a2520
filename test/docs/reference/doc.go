// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package reference holds the folder docs/reference to what has no Go package of its own: the
// values of the chart, and the list of pages. Pages about Go code are held to it by tests
// beside that code; the comments around what is generated name them.
package reference
