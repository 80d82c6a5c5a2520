// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package plan works out what an allocated claim means on this node. It is pure: the
// allocation, the configurations and the inventory give the record that the journal
// will hold, from which package step makes the effects.
package plan
