// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package survey compares the GPUs with the journal: which partitions somebody else has
// made, which devices must not be allocated now, and which partitions of claims are gone.
// It changes nothing.
package survey
